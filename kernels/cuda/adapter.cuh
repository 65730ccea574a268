// Bf16 rows against tokens with mma.sync, in the column order of fragments.cuh.

// Volatile with AHEAD, so that a whole pack's worth is requested before the first use: left to itself the
// compiler asks for 64 columns at a time and waits for the L2 at each.
__device__ __forceinline__ uint4 load_activations16(const void* address) {
#if !AHEAD
  return *(const uint4*)address;
#endif
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address) : "memory");
  return v;
}

struct Tokens { u32 pair[TOKEN_TILES][8]; };

__device__ __forceinline__ Tokens load_tokens(const u16* const* rows, int column, int columns) {
  Tokens x;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n) {
    uint4 low = make_uint4(0, 0, 0, 0), high = make_uint4(0, 0, 0, 0);
    if (!TAIL || column < columns) {  // columns is a multiple of 16, and so is column
      low = load_activations16(rows[n] + column);
      high = load_activations16(rows[n] + column + 8);
    }
    x.pair[n][0] = low.x; x.pair[n][1] = low.y; x.pair[n][2] = low.z; x.pair[n][3] = low.w;
    x.pair[n][4] = high.x; x.pair[n][5] = high.y; x.pair[n][6] = high.z; x.pair[n][7] = high.w;
  }
  return x;
}

// One tile of 16 rows of A (bf16, row-major) against all tokens, packs `begin` on by `step`, into
// this warp's partial sums. Two chunks are requested at once: there are few such warps, so what
// they wait for is not hidden by others.
__device__ __forceinline__ void adapter_tile(float (*sum)[4], const u16* a, int row0,
                                             const u16* const* rows, int columns, int begin,
                                             int end, int step, int g, int t) {
  for (int p = begin; p < end; p += step) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      // Load rows g and g + 8 of A, and x, 16 columns of each chunk.
      uint4 w[2][4] = {};
      Tokens x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = p * PACK_COLUMNS + (c + i) * 64 + t * 16;
        if (!TAIL || column < columns) {
          const u16* upper = a + (u64)(row0 + g) * columns + column;
          const u16* lower = a + (u64)(row0 + g + 8) * columns + column;
          w[i][0] = load_weights16(upper); w[i][1] = load_weights16(upper + 8);
          w[i][2] = load_weights16(lower); w[i][3] = load_weights16(lower + 8);
        }
        x[i] = load_tokens(rows, column, columns);
      }
      // Multiply.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Fragment f;
          f.r[0] = word_of(w[i][0], j);
          f.r[1] = word_of(w[i][2], j);
          f.r[2] = word_of(w[i][1], j);
          f.r[3] = word_of(w[i][3], j);
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; ++n)
            mma_bf16(sum[n], f, x[i].pair[n][j], x[i].pair[n][j + 4]);
        }
      }
    }
  }
}
