// What every kernel over packed four-bit weights shares: the pack layout, the step from codes to
// bf16 A fragments, and thin names for the PTX they are built from. No header is included, so the
// source compiles with NVRTC alone.
//
// A pack is 16 rows x 256 columns of W in 2304 bytes: 2048 of codes, then 256 of scales.
//   codes : uint4[4 chunks][32]. Chunk c covers columns 64c .. 64c+63, four blocks of 16. Entry
//           4g + (t + g / 2) % 4 holds block t of rows g and g + 8: word j has the pairs of columns
//           2j, 2j+1 and 2j+8, 2j+9 of the block, for both rows, which is the A fragment that lane
//           (g, j) of a m16n8k16 product over that block holds (lane = 4g + j). The rotation by
//           g / 2 keeps both ways of reading below free of conflicts.
//   scales: NVFP4, MXFP4: uint2[8 g][4 t], byte 2c + r is the scale of chunk c, row g + 8r, block t.
//           NF4: float[16 rows][4 chunks], one absmax per row and chunk.
//
// The layout can be read in two ways. A lane (g, t) that takes block t's entry whole has one block of
// 16 per row, so two scale expansions serve 32 weights; its product j then runs over columns
// 2j, 2j+1, 2j+8, 2j+9 of four blocks at once, for W and for x alike, and a sum does not mind its
// order (linear_narrow). A lane (g, t) that takes word t of each of row g's four entries has the
// blocks one after another, in x's natural order, as wgmma wants it (linear_wide).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define NVFP4 0
#define MXFP4 1
#define NF4 2

#define PACK_BYTES 2304
#define PACK_COLUMNS 256

// E2M1's sign at bit 15 and its three magnitude bits at 8:6 of each half: as bf16 that is the
// value times 2^-126, subnormals included.
#define CODE_MASK 0x81C081C0u

__device__ __forceinline__ int entry_of(int g, int block) { return 4 * g + ((block + (g >> 1)) & 3); }

__device__ __forceinline__ uint4 load_weights16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}

__device__ __forceinline__ uint2 load_weights8(const void* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
}

__device__ __forceinline__ void allow_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ u32 multiply_bf16x2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ u16 round_bf16(float value) {
  return (u16)(pack_bf16x2(value, 0.0f) & 0xFFFFu);
}

__device__ __forceinline__ float widen_bf16(u16 value) {
  return __uint_as_float((u32)value << 16);
}

// The scale byte of chunk c, row half r as a bf16 pair. NVFP4: unsigned E5M3, value x 2^118.
// MXFP4: the biased exponent itself.
__device__ __forceinline__ u32 expand_scale(uint2 scales, int c, int r) {
  u32 word = (c < 2) ? scales.x : scales.y;
  u32 byte = 2 * (c & 1) + r;
  u32 pair = __byte_perm(word, 0, 0x4040u | byte | (byte << 8));
#if FORMAT == NVFP4
  return pair * 16u + 0x75807580u;
#else
  return pair * 128u;
#endif
}

struct Fragment { u32 r[4]; };  // A of m16n8k16: (g, low), (g+8, low), (g, high), (g+8, high)

#if FORMAT == NF4
// One bf16 pair per byte of two codes, a copy per lane, so that no two lanes meet in a bank.
__device__ __forceinline__ void fill_table(u32* table, const u32* pairs, int thread, int threads) {
  for (int i = thread; i < 256 * 32; i += threads) table[i] = pairs[i >> 5];
}

__device__ __forceinline__ Fragment expand_codes(u32 word, const u32* table_lane) {
  const char* base = (const char*)table_lane;
  Fragment f;
  f.r[0] = *(const u32*)(base + ((word << 7) & 0x7F80u));
  f.r[1] = *(const u32*)(base + ((word >> 1) & 0x7F80u));
  f.r[2] = *(const u32*)(base + ((word >> 9) & 0x7F80u));
  f.r[3] = *(const u32*)(base + ((word >> 17) & 0x7F80u));
  return f;
}
#else
// Bits are scattered at packing so that eight operations give four pairs: three of them a
// (rotate and) mask, the fourth mask, multiply, mask, which moves work to the multiplier's pipe.
__device__ __forceinline__ Fragment expand_codes(u32 word) {
  Fragment f;
  f.r[0] = word & CODE_MASK;
  f.r[1] = __funnelshift_r(word, word, 3) & CODE_MASK;
  f.r[2] = __funnelshift_r(word, word, 6) & CODE_MASK;
  f.r[3] = ((word & 0x001B001Bu) * 0x1084u) & CODE_MASK;
  return f;
}
#endif

__device__ __forceinline__ void scale_fragment(Fragment& f, u32 scale_low, u32 scale_high) {
  f.r[0] = multiply_bf16x2(f.r[0], scale_low);
  f.r[1] = multiply_bf16x2(f.r[1], scale_high);
  f.r[2] = multiply_bf16x2(f.r[2], scale_low);
  f.r[3] = multiply_bf16x2(f.r[3], scale_high);
}

__device__ __forceinline__ u32 word_of(const uint4& v, int j) {
  return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
}

__device__ __forceinline__ void mma_bf16(float* c, const Fragment& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}
