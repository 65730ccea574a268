// z = scaling / global_scale * x A^T for any number of tokens: the first half of a LoRA update,
// for linear_wide to add as further columns. One block a 16 rows of A and 8 * TOKEN_TILES tokens.
//
// Macros: WARPS, TOKEN_TILES, TAIL (FORMAT is unused).

extern "C" __global__ void __launch_bounds__(WARPS * 32) adapter_project(
    const u16* x, const u16* __restrict__ lora_a, const float* __restrict__ global_scale, u16* z,
    int M, int K, int x_stride, int packs, int total_rank, float scaling) {
  __shared__ float partial[WARPS][TOKEN_TILES * 8][20];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int token0 = blockIdx.y * TOKEN_TILES * 8, row0 = blockIdx.x * 16;
  allow_dependents();
  wait_for_prerequisites();
  const u16* rows[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n)
    rows[n] = x + (u64)min(token0 + n * 8 + g, M - 1) * x_stride;
  float sum[TOKEN_TILES][4] = {};
  adapter_tile(sum, lora_a, row0, rows, K, packs, warp, g, t);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      partial[warp][n * 8 + 2 * t + (i & 1)][g + 8 * (i >> 1)] = sum[n][i];
  __syncthreads();
  const float gain = scaling / *global_scale;
  for (int i = threadIdx.x; i < TOKEN_TILES * 128; i += WARPS * 32) {
    const int token = i >> 4, row = i & 15;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += partial[w][token][row];
    if (token0 + token < M)
      z[(u64)(token0 + token) * total_rank + row0 + row] = round_bf16(total * gain);
  }
}
