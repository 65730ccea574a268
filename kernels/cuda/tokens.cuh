// Tokens for mma.sync, in the column order of fragments.cuh.

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
