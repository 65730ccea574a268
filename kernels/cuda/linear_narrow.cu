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
// the next pack early), RESIDENT (blocks that must fit a multiprocessor, which bounds registers; 0
// leaves it open), LORA (add a LoRA update: adapter_fused.cuh).

#if !LORA
#define ALL_WARPS WARPS
#endif
#if RESIDENT
#define BOUNDS ALL_WARPS * 32, RESIDENT
#else
#define BOUNDS ALL_WARPS * 32
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS) linear_narrow(
    const u8* __restrict__ packed, const u16* x, const u16* __restrict__ bias,
    const float* __restrict__ global_scale, u16* y, const u32* __restrict__ table_pairs,
    int M, int N, int K, int x_stride, int packs
#if LORA
    , const u16* __restrict__ lora_a, const u16* __restrict__ lora_b, u64* z, u32* state,
    float scaling, int end0, int end1, int helpers
#endif
    ) {
  constexpr int ROWS = ROW_TILES * 16;
  constexpr int STRIDE = ROWS + 4;  // spreads the lanes' stores over the banks
  __shared__ float partial[ALL_WARPS][TOKEN_TILES * 8][STRIDE];
#if FORMAT == NF4
  extern __shared__ u32 table[];
#endif

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  allow_dependents();

#if LORA
  if ((int)blockIdx.x < helpers) {
    make_z(&partial[0][0][0], STRIDE, x, lora_a, z, state, M, K, x_stride);
    return;
  }
  const int block = blockIdx.x - helpers;
#else
  const int block = blockIdx.x;
#endif
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
  // Load: block t of rows g and g + 8 in all four chunks of a pack, and their scales.
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

#if LORA
  const int begin = warp < WARPS ? warp : packs;  // an extra warp has no columns
  const Projections projections = {end0, end1};
#if JOIN == STAGED
  __shared__ __align__(16) Staged staged;
  if (warp == JOINER) stage_b(staged, lora_b, row0, N, lane);
#else
  const Staged staged;
  if (warp == JOINER) {
    for (int i = lane; i < ROWS * RANK / 64; i += 32)
      if (row0 + i * 64 / RANK < N) prefetch(lora_b + (u64)row0 * RANK + i * 64);
  }
#endif
#else
  const int begin = warp;
#endif
  Pack w;
  // The first weights are requested ahead of the wait: nothing in front writes them.
  if (begin < packs) w = load_pack(begin);
#if FORMAT == NF4
  fill_table(table, table_pairs, threadIdx.x, ALL_WARPS * 32);
  __syncthreads();
  const u32* table_lane = table + lane;
#endif
  wait_for_prerequisites();
#if LORA
  u32 number = 0, before = 0;
#if JOIN == STAGED
  if (warp == JOINER) stage_z(staged, z, state, projections.of(row0), M, lane);
#else
  if (warp == JOINER && lane == 0) number = load_number(state);
#endif
#endif

  const u16* rows[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n) rows[n] = x + (u64)min(n * 8 + g, M - 1) * x_stride;

  // A pack per turn, chunk by chunk: load x, decode, multiply.
  for (int p = begin; p < packs; p += WARPS) {
#if !PREFETCH
    if (p != begin) w = load_pack(p);
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
        // Decode the scales of two rows' blocks, then four codes of each row at a time; multiply.
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
#if LORA
  // Add the LoRA update to this warp's sums.
  if (warp == JOINER) {
#if JOIN == STAGED
    wait_for_copies();
    number = staged.state[0] + 1;
#endif
    if (lane == 0) before = note_reading(state, number, M);
    number = __shfl_sync(0xFFFFFFFFu, number, 0);
    add_update(sum, lora_b, z, number, scaling / *global_scale, row0, M, N, projections, staged);
  }
#endif

  // Reduce over the warps: their sums meet in shared memory, [warp][token][row].
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

  // Add up in order, apply gain and bias, round once, store.
  const float gain = *global_scale;
  for (int i = threadIdx.x; i < M * ROWS; i += ALL_WARPS * 32) {
    const int token = i / ROWS, row = i % ROWS;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < ALL_WARPS; ++w) total += partial[w][token][row];
    if (row0 + row < N) {
      total *= gain;
      if (bias) total += widen_bf16(bias[row0 + row]);
      y[(u64)token * N + row0 + row] = round_bf16(total);
    }
  }
#if LORA
  if (warp == JOINER && lane == 0) move_on(state, before, number);
#endif
}
