// z = scaling / global_scale * x A^T for any number of tokens: the first half of a LoRA update,
// for linear_wide to add as further columns. A cluster of CLUSTER blocks takes 16 rows of A and
// 8 * TOKEN_TILES tokens; its blocks, and their warps, split the columns. The sums meet in shared
// memory, the cluster's in a fixed order.
//
// Macros: WARPS, TOKEN_TILES, TAIL, CLUSTER (FORMAT is unused).

#define TOKENS (TOKEN_TILES * 8)

extern "C" __global__ void __launch_bounds__(WARPS * 32) adapter_project(
    const u16* x, const u16* __restrict__ lora_a, const float* __restrict__ global_scale, u16* z,
    int M, int K, int x_stride, int packs, int total_rank, float scaling) {
  __shared__ float partial[WARPS][TOKENS][20];
  __shared__ float own[TOKENS * 16];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x % CLUSTER, row0 = blockIdx.x / CLUSTER * 16;
  const int token0 = blockIdx.y * TOKENS;
  // In this order, linear_wide starts when x is there, beside this launch, and waits for z by itself.
  wait_for_prerequisites();
  allow_dependents();
  const u16* rows[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n)
    rows[n] = x + (u64)min(token0 + n * 8 + g, M - 1) * x_stride;
  // Multiply this warp's packs of columns.
  float sum[TOKEN_TILES][4] = {};
  adapter_tile(sum, lora_a, row0, rows, K, warp * CLUSTER + rank, packs, WARPS * CLUSTER, g, t);
  // Reduce over the warps: [warp][token][row of A] to [token][row of A].
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      partial[warp][n * 8 + 2 * t + (i & 1)][g + 8 * (i >> 1)] = sum[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < TOKENS * 16; i += WARPS * 32) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += partial[w][i >> 4][i & 15];
    own[i] = total;
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  // Reduce over the cluster's blocks in order, scale, round once, and store z.
  const float gain = scaling / *global_scale;
  const u32 base = (u32)__cvta_generic_to_shared(own);
  for (int i = threadIdx.x * CLUSTER + rank; i < TOKENS * 16; i += WARPS * 32 * CLUSTER) {
    float total = 0.0f;
#pragma unroll
    for (int owner = 0; owner < CLUSTER; ++owner) {
      u32 remote;
      float part;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                   : "=r"(remote) : "r"(base + i * 4), "r"(owner));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote) : "memory");
      total += part;
    }
    if (token0 + (i >> 4) < M)
      z[(u64)(token0 + (i >> 4)) * total_rank + row0 + (i & 15)] = round_bf16(total * gain);
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
