// y = x @ dequantize(W).T + bias for many tokens, on warpgroup products (wgmma).
//
// A block is one producer warpgroup and CONSUMERS consumer warpgroups, each with ROW_TILES tiles of
// 64 rows of W, against TOKENS tokens. Weights are A: packed codes go from device memory to
// registers one pack ahead and become fragments there, while the products of the fragments before
// run. x is B: the producer copies chunks of 64 columns into a ring of STAGES swizzled tiles,
// putting columns into the order of fragments.cuh as it does so (4-byte asynchronous copies, one
// row of 128 bytes a warp: coalesced on both sides and free of bank conflicts).
//
// Work is dealt in packs. The first `whole` tiles of each block are complete; the rest are cut
// into equal contiguous ranges of packs, whatever tile they fall in. Blocks that share a tile put
// their sums into a workspace, wait for one another, and each add up a slice in a fixed order: no
// atomics on results, the same bits each run. All blocks are resident, so waiting cannot deadlock.
//
// Macros: FORMAT, CONSUMERS, ROW_TILES, TOKENS, STAGES, TAIL, LORA.

#define LAG 2                                // chunks in flight before one is published
#define BLOCK_ROWS (CONSUMERS * ROW_TILES * 64)
#define STAGE_BYTES (TOKENS * 128)
#define TABLE_OFFSET (1024 + STAGES * STAGE_BYTES)  // behind the ring, wherever it is aligned to
#define ACCUMULATORS (TOKENS / 2)            // a thread and row tile

struct Segment { int tile, begin, end; };    // packs [begin, end) of a tile; empty: none left

struct Plan {
  int packs, whole, blocks;
  long long stream;                          // packs dealt as ranges
  int dealt;                                 // to so many blocks, none of them empty-handed
  __device__ int start(int block) const {
    return block >= dealt ? (int)stream : (int)(stream * block / dealt);
  }
  __device__ int owner(int unit) const {
    return (int)(((long long)(unit + 1) * dealt - 1) / stream);
  }
  __device__ Segment segment(int block, int index) const {
    Segment s;
    if (index < whole) {
      s.tile = block + index * blocks; s.begin = 0; s.end = packs;
      return s;
    }
    const int first = start(block), last = start(block + 1);
    const int tile = first / packs + index - whole;
    s.tile = whole * blocks + tile;
    s.begin = index == whole ? first - tile * packs : 0;
    s.end = min(packs, last - tile * packs);
    return s;
  }
};

#if CONSUMERS == 2
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
#else
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 152
#endif

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1) linear_wide(
    const u8* __restrict__ packed, const u16* x, const u16* __restrict__ bias,
    const float* __restrict__ global_scale, u16* y, const u32* __restrict__ table_pairs,
    float* workspace, u32* counters,
    int M, int N, int K, int x_stride, int packs, int row_tiles16, int token_tiles, int tiles,
    int whole, const u16* __restrict__ lora_b, const u16* z, int rank, int adapters,
    int adapter_end0, int adapter_end1) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  u32 stage0;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(stage0) : "l"(shared));
  stage0 = (stage0 + 1023u) & ~1023u;
  u32 full0;
  asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }"
      : "=r"(full0) : "l"(barriers));
  const u32 empty0 = full0 + 8 * STAGES;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = threadIdx.x >> 7;
  allow_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full0 + 8 * s, 128);
      barrier_init(empty0 + 8 * s, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if FORMAT == NF4
  u32* table = (u32*)(shared + TABLE_OFFSET);
  fill_table(table, table_pairs, threadIdx.x, (CONSUMERS + 1) * 128);
#endif
  __syncthreads();

  Plan plan;
  plan.packs = packs;
  plan.whole = whole;
  plan.blocks = gridDim.x;
  plan.stream = (long long)(tiles - whole * (int)gridDim.x) * packs;
  plan.dealt = (int)min((long long)plan.blocks, plan.stream);
  const int block = blockIdx.x;
#if LORA
  const int adapter_chunks = (rank + 63) / 64;
#endif

  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    wait_for_prerequisites();
    const int first = warp & 3;  // rows first, first + 4, ... of the tile
    const int pair = lane & 7, word = lane >> 3;
    const u32 even = ((pair ^ first) << 4) + word * 4 + first * 128;
    const u32 odd = ((pair ^ (first + 4)) << 4) + word * 4 + first * 128;
    int stage = 0, pending = 0, publish = 0;
    u32 phase = 0;
    auto copy_chunk = [&](const u16* source, long long stride, int rows, int bytes) {
      barrier_wait(empty0 + 8 * stage, phase ^ 1);
      const u32 target = stage0 + stage * STAGE_BYTES;
#pragma unroll 8
      for (int i = 0; i < TOKENS / 4; ++i) {
        if (first + 4 * i < rows)
          copy_async4(target + ((i & 1) ? odd : even) + i * 512, source + i * 4 * stride, bytes);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      if (++stage == STAGES) { stage = 0; phase ^= 1; }
      if (++pending > LAG) {
        asm volatile("cp.async.wait_group %0;" :: "n"(LAG) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(full0 + 8 * publish);
        if (++publish == STAGES) publish = 0;
        --pending;
      }
    };
    for (int index = 0;; ++index) {
      const Segment s = plan.segment(block, index);
      if (s.end <= s.begin) break;
      const int token0 = (s.tile % token_tiles) * TOKENS;
      const int rows = M - token0;
      const u16* source = x + (long long)(token0 + first) * x_stride + lane * 2;
      for (int chunk = s.begin * 4; chunk < s.end * 4; ++chunk)
        copy_chunk(source + chunk * 64, x_stride, rows,
                   !TAIL || chunk * 64 + lane * 2 < K ? 4 : 0);
#if LORA
      if (s.end == packs) {
        const int row0 = (s.tile / token_tiles) * BLOCK_ROWS;
        const int adapter = (row0 >= adapter_end0) + (row0 >= adapter_end1);
        const int total = adapters * rank;
        const u16* update = z + (long long)(token0 + first) * total + adapter * rank + lane * 2;
        for (int chunk = 0; chunk < adapter_chunks; ++chunk)
          copy_chunk(update + chunk * 64, total, rows, chunk * 64 + lane * 2 < rank ? 4 : 0);
      }
#endif
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (; pending > 0; --pending) {
      barrier_arrive(full0 + 8 * publish);
      if (++publish == STAGES) publish = 0;
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
  const int g = lane >> 2, t = lane & 3;
  const int row_in_block = group * ROW_TILES * 64 + (warp & 3) * 16;
#if FORMAT == NF4
  const u32* table_lane = table + lane;
#endif
  float sum[ROW_TILES][ACCUMULATORS];
  uint4 codes[ROW_TILES][4];
#if FORMAT == NF4
  uint4 scales[ROW_TILES][2], next_scales[ROW_TILES][2];
#else
  uint2 scales[ROW_TILES], next_scales[ROW_TILES];
#endif
  auto pack_of = [&](int tile, int pack, int r) {
    const int tile16 = ((tile / token_tiles) * BLOCK_ROWS + row_in_block) / 16 + r * 4;
    return packed + ((u64)min(tile16, row_tiles16 - 1) * packs + pack) * PACK_BYTES;
  };
#if FORMAT == NF4
#define LOAD_SCALES(target, r, source)                                  \
  target[r][0] = load_weights16((source) + 2048 + g * 16);              \
  target[r][1] = load_weights16((source) + 2048 + (g + 8) * 16)
#else
#define LOAD_SCALES(target, r, source) target[r] = load_weights8((source) + 2048 + lane * 8)
#endif
  Segment s = plan.segment(block, 0);
  const u8* source[ROW_TILES];
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    source[r] = pack_of(s.tile, s.begin, r);
#pragma unroll
    for (int c = 0; c < 4; ++c) codes[r][c] = load_weights16(source[r] + (c * 32 + lane) * 16);
    LOAD_SCALES(scales, r, source[r]);
  }
  const float gain = *global_scale;
  wait_for_prerequisites();

  int stage = 0, previous = -1;
  u32 phase = 0;
  auto products = [&](float* d, const Fragment* a) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma(d, a[j], describe(stage0 + stage * STAGE_BYTES + j * 32));
    wgmma_commit();
    wgmma_wait<1>();
  };
  auto release = [&]() {  // the chunk before: its products are done
    if (previous >= 0 && lane == 0) barrier_arrive(empty0 + 8 * previous);
  };
  auto advance = [&]() {
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };

  // Four sums of 8 tokens: rows g and g + 8, tokens 2t and 2t + 1, out as 8 rows a store.
  auto emit = [&](int row0, int token0, const float* v) {
    const int upper = row0 + g, lower = row0 + g + 8;
    const float bias_upper = bias && upper < N ? widen_bf16(bias[upper]) : 0.0f;
    const float bias_lower = bias && lower < N ? widen_bf16(bias[lower]) : 0.0f;
    const u32 high = pack_bf16x2(fmaf(v[0], gain, bias_upper), fmaf(v[1], gain, bias_upper));
    const u32 low = pack_bf16x2(fmaf(v[2], gain, bias_lower), fmaf(v[3], gain, bias_lower));
    const u32 out[2] = {transpose8x8(high), transpose8x8(low)};
    const int token = token0 + g;
    if (token >= M) return;
    u16* target = y + (long long)token * N + row0 + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h + 2 * t;
      if (!(N & 1)) {
        if (row < N) *(u32*)(target + 8 * h) = out[h];
      } else {
        if (row < N) target[8 * h] = (u16)out[h];
        if (row + 1 < N) target[8 * h + 1] = (u16)(out[h] >> 16);
      }
    }
  };
  const int thread = threadIdx.x;               // 0 .. CONSUMERS * 128 - 1
  constexpr int SLOTS = ROW_TILES * TOKENS / 8; // float4 a thread
  auto slot_of = [&](int owner, int second, int slot) {
    return (float4*)workspace + ((long long)(owner * 2 + second) * SLOTS + slot)
        * (CONSUMERS * 128) + thread;
  };
  auto meet = [&]() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS * 128) : "memory"); };

  int index = 0, shared_tiles = 0;
  int shared_tile[2];
  while (s.end > s.begin) {
    const Segment next = plan.segment(block, index + 1);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) sum[r][i] = 0.0f;

    for (int pack = s.begin; pack < s.end; ++pack) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        if (pack + 1 < s.end) source[r] += PACK_BYTES;
        else if (next.end > next.begin) source[r] = pack_of(next.tile, next.begin, r);
        LOAD_SCALES(next_scales, r, source[r]);
      }
      Fragment a[2][4];  // products read one while the other is filled
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          Fragment* fragment = a[(c * ROW_TILES + r) & 1];
#if FORMAT == NF4
          const float upper_absmax = __uint_as_float(word_of(scales[r][0], c));
          const float lower_absmax = __uint_as_float(word_of(scales[r][1], c));
          const u32 upper = pack_bf16x2(upper_absmax, upper_absmax);
          const u32 lower = pack_bf16x2(lower_absmax, lower_absmax);
#else
          const u32 upper = expand_scale(scales[r], c, 0), lower = expand_scale(scales[r], c, 1);
#endif
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#if FORMAT == NF4
            fragment[j] = expand_codes(word_of(codes[r][c], j), table_lane);
#else
            fragment[j] = expand_codes(word_of(codes[r][c], j));
#endif
            scale_fragment(fragment[j], upper, lower);
          }
          codes[r][c] = load_weights16(source[r] + (c * 32 + lane) * 16);
          if (r == 0) barrier_wait(full0 + 8 * stage, phase);
          products(sum[r], fragment);
          if (r == 0) release();
        }
        advance();
      }
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
#if FORMAT == NF4
        scales[r][0] = next_scales[r][0];
        scales[r][1] = next_scales[r][1];
#else
        scales[r] = next_scales[r];
#endif
      }
    }

    const int row_start = (s.tile / token_tiles) * BLOCK_ROWS + row_in_block;
    const int token_start = (s.tile % token_tiles) * TOKENS;
#if LORA
    if (s.end == packs) {
      for (int chunk = 0; chunk < adapter_chunks; ++chunk) {
        barrier_wait(full0 + 8 * stage, phase);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
          wgmma_wait<0>();
          if (r == 0) release();
          const int column = chunk * 64 + t * 16;
          uint4 w[4] = {};
          if (column < rank) {
            const int row = row_start + r * 64 + g;
            const uint4* upper = (const uint4*)(lora_b + (u64)min(row, N - 1) * rank + column);
            const uint4* lower = (const uint4*)(lora_b + (u64)min(row + 8, N - 1) * rank + column);
            w[0] = upper[0]; w[1] = upper[1]; w[2] = lower[0]; w[3] = lower[1];
          }
          Fragment f[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            f[j].r[0] = word_of(w[j >> 1], 2 * (j & 1));
            f[j].r[1] = word_of(w[2 + (j >> 1)], 2 * (j & 1));
            f[j].r[2] = word_of(w[j >> 1], 2 * (j & 1) + 1);
            f[j].r[3] = word_of(w[2 + (j >> 1)], 2 * (j & 1) + 1);
          }
          products(sum[r], f);
        }
        advance();
      }
    }
#endif
    wgmma_wait<0>();
    release();
    previous = -1;

    if (s.begin == 0 && s.end == packs) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i)
          if (token_start + i * 8 < M)
            emit(row_start + r * 64, token_start + i * 8, &sum[r][i * 4]);
    } else {
      // First segment of the range or its last one: the reader tells which by the range's start.
      const int stream_tile = s.tile - whole * (int)gridDim.x;
      const int second = plan.start(block) < stream_tile * packs;
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int i = 0; i < TOKENS / 8; ++i)
          __stcg(slot_of(block, second, r * (TOKENS / 8) + i),
                 make_float4(sum[r][i * 4], sum[r][i * 4 + 1], sum[r][i * 4 + 2],
                             sum[r][i * 4 + 3]));
      __threadfence();
      meet();
      if (thread == 0) atomicAdd(counters + 2 * stream_tile, 1u);
      if (shared_tiles == 0) shared_tile[0] = stream_tile; else shared_tile[1] = stream_tile;
      ++shared_tiles;
    }
    s = next;
    ++index;
  }

  for (int k = 0; k < shared_tiles; ++k) {
    const int tile = k == 0 ? shared_tile[0] : shared_tile[1];
    const int first = plan.owner(tile * packs), last = plan.owner(tile * packs + packs - 1);
    const int sharers = last - first + 1;
    if (thread == 0) {
      u32 seen;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(seen) : "l"(counters + 2 * tile) : "memory");
      } while (seen < (u32)sharers);
    }
    meet();
    const int whole_tile = tile + whole * (int)gridDim.x;
    const int row_start = (whole_tile / token_tiles) * BLOCK_ROWS + row_in_block;
    const int token_start = (whole_tile % token_tiles) * TOKENS;
    for (int slot = block - first; slot < SLOTS; slot += sharers) {
      const int token = token_start + (slot % (TOKENS / 8)) * 8;
      if (token >= M) continue;
      float v[4] = {};
#pragma unroll 4
      for (int owner = first; owner <= last; ++owner) {
        const float4 p = __ldcg(slot_of(owner, plan.start(owner) < tile * packs, slot));
        v[0] += p.x; v[1] += p.y; v[2] += p.z; v[3] += p.w;
      }
      emit(row_start + slot / (TOKENS / 8) * 64, token, v);
    }
    meet();
    if (thread == 0 && atomicAdd(counters + 2 * tile + 1, 1u) == (u32)sharers - 1) {
      counters[2 * tile] = 0;
      counters[2 * tile + 1] = 0;
      __threadfence();
    }
  }
}
