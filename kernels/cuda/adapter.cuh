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

// One tile of 16 rows of A (bf16, row-major) against all tokens, into this warp's partial sums.
__device__ __forceinline__ void adapter_tile(float (*sum)[4], const u16* a, int row0,
                                             const u16* const* rows, int columns, int packs,
                                             int warp, int g, int t) {
  for (int p = warp; p < packs; p += WARPS) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      int column = p * PACK_COLUMNS + c * 64 + t * 16;
      if (TAIL && column - t * 16 >= columns) break;
      uint4 w[4] = {};
      if (!TAIL || column < columns) {
        const uint4* upper = (const uint4*)(a + (u64)(row0 + g) * columns + column);
        const uint4* lower = (const uint4*)(a + (u64)(row0 + g + 8) * columns + column);
        w[0] = upper[0]; w[1] = upper[1]; w[2] = lower[0]; w[3] = lower[1];
      }
      Tokens x = load_tokens(rows, column, columns);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Fragment f;
        f.r[0] = word_of(w[0], j);
        f.r[1] = word_of(w[2], j);
        f.r[2] = word_of(w[1], j);
        f.r[3] = word_of(w[3], j);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n)
          mma_bf16(sum[n], f, x.pair[n][j], x.pair[n][j + 4]);
      }
    }
  }
}
