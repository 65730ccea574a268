// Packs back to a dense row-major matrix in bf16 or fp16, equal to the reference: every value is
// code * scale in float32, rounded once. One warp per pack; writes are whole 32-byte sectors.
//
// Macros: FORMAT, HALF (fp16 instead of bf16).

#if HALF
__device__ __forceinline__ u32 round_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
#else
__device__ __forceinline__ u32 round_pair(float low, float high) {
  return pack_bf16x2(low, high);
}
#endif

__device__ __forceinline__ float e5m3_value(u32 byte) {  // exact; 0 for byte 0
  return byte ? __uint_as_float((((byte >> 3) + 117u) << 23) | ((byte & 7u) << 20)) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(256) dequantize_packs(
    const u8* __restrict__ packed, const float* __restrict__ scale, const float* __restrict__ table,
    u16* out, int N, int K, int packs, int tiles) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#if FORMAT == NF4
  __shared__ float values[16];
  if (threadIdx.x < 16) values[threadIdx.x] = table[threadIdx.x];
  __syncthreads();
#endif
  allow_dependents();
  const long long index = (long long)blockIdx.x * 8 + (threadIdx.x >> 5);
  if (index >= (long long)tiles * packs) return;
  const int tile = (int)(index / packs), pack = (int)(index % packs);
  const u8* source = packed + index * PACK_BYTES;
  // Load: block t of rows g and g + 8 in all four chunks of a pack, and their scales.
  uint4 codes[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) codes[c] = load_weights16(source + (c * 32 + entry_of(g, t)) * 16);
#if FORMAT == NF4
  uint4 absmax[2] = {load_weights16(source + 2048 + g * 16),
                     load_weights16(source + 2048 + (g + 8) * 16)};
#else
  const uint2 bytes = load_weights8(source + 2048 + lane * 8);
#endif
#if FORMAT == NVFP4
  const float whole = *scale;  // the encode scale
#elif FORMAT == MXFP4
  const u32 gain_bits = __float_as_uint(*scale);
  const int gain_power = gain_bits < 0x00800000u ? -127 : (int)(gain_bits >> 23) - 127;
#endif
  wait_for_prerequisites();
  // For each chunk and each of the two rows: decode the scale, decode the codes, multiply, store.
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#if FORMAT == NF4
      const float factor = __uint_as_float(word_of(absmax[h], c));
#else
      const u32 word = c < 2 ? bytes.x : bytes.y;
      const u32 byte = (word >> (16 * (c & 1) + 8 * h)) & 255u;
#if FORMAT == NVFP4
      const float factor = __fdiv_rn(e5m3_value(byte), whole);
#else
      // The gain is a power of two, 2^-127 (a subnormal) included, and so is the product.
      const int power = (int)byte - 253 + gain_power;
      const float factor = __uint_as_float(power > -127 ? (u32)(power + 127) << 23
                                                        : power == -127 ? 1u << 22 : 0u);
#endif
#endif
      u32 out8[8];  // pair p: columns 2p, 2p + 1 of the lane's sixteen
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const u32 w = word_of(codes[c], j);
          const int i = 2 * p + h;
          float low, high;
#if FORMAT == NF4
          const u32 pair = (w >> (8 * i)) & 255u;
          low = values[pair & 15u];
          high = values[pair >> 4];
#else
          const u32 pair = expand_codes(w).r[i];
          low = __uint_as_float(pair << 16) * 8.507059173023462e37f;        // 2^126
          high = __uint_as_float(pair & 0xFFFF0000u) * 8.507059173023462e37f;
#endif
          out8[j + 4 * p] = round_pair(low * factor, high * factor);
        }
      }
      // Neighbouring lanes trade halves, so that a pair of lanes writes 32 adjacent bytes.
      const bool is_odd = t & 1;
      u32 first[4], second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 given = is_odd ? out8[i] : out8[4 + i];
        const u32 taken = __shfl_xor_sync(0xFFFFFFFFu, given, 1);
        first[i] = is_odd ? taken : out8[i];
        second[i] = is_odd ? out8[4 + i] : taken;
      }
      const int row = tile * 16 + h * 8 + g;
      const int column = pack * PACK_COLUMNS + c * 64 + (t >> 1) * 32 + (is_odd ? 8 : 0);
      if (row < N) {
        u16* target = out + (long long)row * K + column;
        if (column < K) *(uint4*)target = make_uint4(first[0], first[1], first[2], first[3]);
        if (column + 16 < K)
          *(uint4*)(target + 16) = make_uint4(second[0], second[1], second[2], second[3]);
      }
    }
  }
}
