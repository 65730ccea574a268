// y = x @ dequantize(W).T + bias for few tokens (M <= 8 * TOKEN_TILES), at the memory's speed.
//
// Simplest form that streams: a block of WARPS warps owns ROW_TILES tiles of 16 rows; its warps
// split the columns by packs; a lane has one pack's loads (4 x 16 bytes and 8) in flight at once;
// x goes from L2 to registers; codes become A fragments of mma.sync in registers; one barrier and
// a sum over the warps in shared memory. Many resident blocks hide one another's latency, which
// beat deeper prefetch, persistent blocks and bulk copies (kernels/README.md).
//
// Weights are requested before griddepcontrol.wait, x after it: under programmatic dependent
// launch the ramp of one layer overlaps the tail of the one before.
//
// Macros: FORMAT, WARPS, ROW_TILES, TOKEN_TILES, TAIL (columns not a multiple of 256),
// AHEAD (chunks of x requested at once, 1, 2 or 4; 0 leaves it to the compiler), PREFETCH (request
// the next pack early), RESIDENT (blocks that must fit a multiprocessor, which bounds registers; 0 leaves it open).


#if RESIDENT
#define BOUNDS WARPS * 32, RESIDENT
#else
#define BOUNDS WARPS * 32
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS) linear_narrow(
    const u8* __restrict__ packed, const u16* x, const u16* __restrict__ bias,
    const float* __restrict__ global_scale, u16* y, const u32* __restrict__ table_pairs,
    int M, int N, int K, int x_stride, int packs) {
  constexpr int ROWS = ROW_TILES * 16;
  constexpr int STRIDE = ROWS + 4;  // spreads the lanes' stores over the banks
  __shared__ float partial[WARPS][TOKEN_TILES * 8][STRIDE];
#if FORMAT == NF4
  extern __shared__ u32 table[];
#endif

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  allow_dependents();

  const int block = blockIdx.x;
  float sum[ROW_TILES][TOKEN_TILES][4] = {};
  const u8* tile = packed + (u64)block * ROW_TILES * packs * PACK_BYTES;
  const int row0 = block * ROWS;

  struct Pack {
    uint4 codes[ROW_TILES][4];
#if FORMAT == NF4
    uint4 absmax[ROW_TILES][2];
#else
    uint2 scales[ROW_TILES];
#endif
  };
  auto load_pack = [&](int p) {
    Pack w;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
      const u8* pack = tile + ((u64)r * packs + p) * PACK_BYTES;
#pragma unroll
      for (int c = 0; c < 4; ++c) w.codes[r][c] = load_weights16(pack + (c * 32 + entry_of(g, t)) * 16);
#if FORMAT == NF4
#pragma unroll
      for (int h = 0; h < 2; ++h) w.absmax[r][h] = load_weights16(pack + 2048 + (g + 8 * h) * 16);
#else
      w.scales[r] = load_weights8(pack + 2048 + lane * 8);
#endif
    }
    return w;
  };

  Pack w;
  if (warp < packs) w = load_pack(warp);
#if FORMAT == NF4
  fill_table(table, table_pairs, threadIdx.x, WARPS * 32);
  __syncthreads();
  const u32* table_lane = table + lane;
#endif
  wait_for_prerequisites();

  const u16* rows[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n) rows[n] = x + (u64)min(n * 8 + g, M - 1) * x_stride;


  for (int p = warp; p < packs; p += WARPS) {
#if !PREFETCH
    if (p != warp) w = load_pack(p);
#else
    Pack next = w;
    if (p + WARPS < packs) next = load_pack(p + WARPS);
#endif
#if AHEAD
    Tokens ahead[AHEAD];
#endif
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#if AHEAD
      if (c % AHEAD == 0) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          ahead[i] = load_tokens(rows, p * PACK_COLUMNS + (c + i) * 64 + t * 16, K);
      }
      const Tokens& xs = ahead[c % AHEAD];
#else
      const Tokens xs = load_tokens(rows, p * PACK_COLUMNS + c * 64 + t * 16, K);
#endif
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#if FORMAT == NF4
        // One absmax covers the whole chunk, so it multiplies the float32 sum, not the weights.
        float chunk[TOKEN_TILES][4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Fragment f = expand_codes(word_of(w.codes[r][c], j), table_lane);
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; ++n)
            mma_bf16(chunk[n], f, xs.pair[n][j], xs.pair[n][j + 4]);
        }
        const float upper = __uint_as_float(word_of(w.absmax[r][0], c));
        const float lower = __uint_as_float(word_of(w.absmax[r][1], c));
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
          sum[r][n][0] = fmaf(chunk[n][0], upper, sum[r][n][0]);
          sum[r][n][1] = fmaf(chunk[n][1], upper, sum[r][n][1]);
          sum[r][n][2] = fmaf(chunk[n][2], lower, sum[r][n][2]);
          sum[r][n][3] = fmaf(chunk[n][3], lower, sum[r][n][3]);
        }
#else
        const u32 upper = expand_scale(w.scales[r], c, 0), lower = expand_scale(w.scales[r], c, 1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Fragment f = expand_codes(word_of(w.codes[r][c], j));
          scale_fragment(f, upper, lower);
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; ++n)
            mma_bf16(sum[r][n], f, xs.pair[n][j], xs.pair[n][j + 4]);
        }
#endif
      }
    }
#if PREFETCH
    w = next;
#endif
  }


#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = n * 8 + 2 * t + (i & 1);
        if (token < M) partial[warp][token][r * 16 + g + 8 * (i >> 1)] = sum[r][n][i];
      }
  __syncthreads();

  const float gain = *global_scale;
  for (int i = threadIdx.x; i < M * ROWS; i += WARPS * 32) {
    const int token = i / ROWS, row = i % ROWS;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += partial[w][token][row];
    if (row0 + row < N) {
      total *= gain;
      if (bias) total += widen_bf16(bias[row0 + row]);
      y[(u64)token * N + row0 + row] = round_bf16(total);
    }
  }
}
