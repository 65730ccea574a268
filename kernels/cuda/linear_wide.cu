// y = x @ dequantize(W).T + bias for many tokens, on warpgroup products (wgmma).
//
// A block is one producer warpgroup and CONSUMERS consumer warpgroups, each with ROW_TILES tiles of
// 64 rows of W, against TOKENS tokens. Two threads of the producer keep two rings of shared memory
// full: x in swizzled tiles of 64 columns by tensor copies, W in packs by bulk copies, the latter
// already before the kernel in front has ended. Weights are A: a lane reads codes from the ring,
// makes fragments of them in registers, and does so while the products of the fragments before
// run. x is B, straight from the ring, in its natural order.
//
// Work is dealt in packs. The first `whole` tiles of each block are complete; the rest are cut
// into equal contiguous ranges of packs, whatever tile they fall in. Blocks that share a tile put
// their sums into a workspace, wait for one another, and each add up a slice in a fixed order: no
// atomics on results, the same bits each run. All blocks are resident, so waiting cannot deadlock.
//
// With CLUSTER above 1, a cluster of so many blocks takes one tile instead, each an equal range of
// its packs, and the sums meet in the blocks' shared memory: no trip through the L2, which is what
// a small layer's time goes into otherwise.
//
// Macros: CLUSTER, FORMAT, CONSUMERS, ROW_TILES, TOKENS, STAGES (of x), PACKS (stages of W).

#define BLOCK_ROWS (CONSUMERS * ROW_TILES * 64)
#define TILES16 (BLOCK_ROWS / 16)
#define STAGE_BYTES (TOKENS * 128)
#define PACKS_BYTES (TILES16 * PACK_BYTES)
#define PACKS_OFFSET (STAGES * STAGE_BYTES)
#define TABLE_OFFSET (PACKS_OFFSET + PACKS * PACKS_BYTES)
#define ACCUMULATORS (TOKENS / 2)            // per thread and row tile

struct Segment { int tile, begin, end; };    // packs [begin, end) of a tile; empty: none left

struct Plan {
  int packs, whole, blocks;
  int stream;                                // packs dealt as ranges; times blocks, below 2^31
  int dealt;                                 // to so many blocks, none of them empty-handed
  __device__ int start(int block) const {
    return block >= dealt ? stream : stream * block / dealt;
  }
  __device__ int owner(int unit) const { return ((unit + 1) * dealt - 1) / stream; }
  __device__ Segment segment(int block, int index) const {
    Segment s;
#if CLUSTER > 1
    const int rank = block % CLUSTER;
    s.tile = block / CLUSTER;
    s.begin = packs * rank / CLUSTER;
    s.end = index ? 0 : packs * (rank + 1) / CLUSTER;
    return s;
#endif
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

#define THREADS ((CONSUMERS + 1) * 128)
#if CONSUMERS == 2
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#else
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wide(
    const __grid_constant__ TensorMap x_map, const u8* __restrict__ packed,
    const u16* __restrict__ bias,
    const float* __restrict__ global_scale, u16* y, const u32* __restrict__ table_pairs,
    float* workspace, u32* counters,
    int M, int N, int packs, int row_tiles16, int token_tiles, int tiles, int whole) {
  extern __shared__ u8 shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + 2 * PACKS];
  const u32 stage0 = (shared_address(shared) + 1023u) & ~1023u;  // the swizzle counts from 1024
  const u32 full0 = shared_address(barriers), empty0 = full0 + 8 * STAGES;
  const u32 packs_full0 = empty0 + 8 * STAGES, packs_empty0 = packs_full0 + 8 * PACKS;
  const u32 packs0 = stage0 + PACKS_OFFSET;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = threadIdx.x >> 7;
  allow_dependents();
  // One arrival fills a stage of a ring; one from each consumer warp frees it.
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full0 + 8 * s, 1);
      barrier_init(empty0 + 8 * s, CONSUMERS * 4);
    }
    for (int s = 0; s < PACKS; ++s) {
      barrier_init(packs_full0 + 8 * s, 1);
      barrier_init(packs_empty0 + 8 * s, CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#if FORMAT == NF4
  u32* table = (u32*)(shared + (stage0 - shared_address(shared)) + TABLE_OFFSET);
  fill_table(table, table_pairs, threadIdx.x, THREADS);
#endif
  __syncthreads();

  Plan plan;
  plan.packs = packs;
  plan.whole = whole;
  plan.blocks = gridDim.x;
  plan.stream = (tiles - whole * (int)gridDim.x) * packs;
  plan.dealt = min(plan.blocks, plan.stream);
  const int block = blockIdx.x;

  // Producer: keeps both rings full.
  if (group == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
    if ((warp & 3) == 0 && lane == 0) {  // x
      wait_for_prerequisites();
      int stage = 0;
      u32 phase = 1;
      for (int index = 0;; ++index) {
        const Segment s = plan.segment(block, index);
        if (s.end <= s.begin) break;
        const int token0 = (s.tile % token_tiles) * TOKENS;
        for (int chunk = s.begin * 4; chunk < s.end * 4; ++chunk) {
          barrier_wait(empty0 + 8 * stage, phase);
          barrier_expect(full0 + 8 * stage, STAGE_BYTES);
          copy_tile(stage0 + stage * STAGE_BYTES, x_map, chunk * 64, token0, full0 + 8 * stage);
          if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
      }
    } else if ((warp & 3) == 1 && lane == 0) {  // W: no kernel in front writes it
      int stage = 0;
      u32 phase = 1;
      for (int index = 0;; ++index) {
        const Segment s = plan.segment(block, index);
        if (s.end <= s.begin) break;
        const int tile16 = (s.tile / token_tiles) * TILES16;
        const int present = min(TILES16, row_tiles16 - tile16);
        for (int pack = s.begin; pack < s.end; ++pack) {
          barrier_wait(packs_empty0 + 8 * stage, phase);
          const u32 full = packs_full0 + 8 * stage;
          barrier_expect(full, present * PACK_BYTES);
          const u8* source = packed + ((u64)tile16 * packs + pack) * PACK_BYTES;
          for (int i = 0; i < present; ++i)
            copy_bytes(packs0 + stage * PACKS_BYTES + i * PACK_BYTES,
                       source + (u64)i * packs * PACK_BYTES, PACK_BYTES, full);
          if (++stage == PACKS) { stage = 0; phase ^= 1; }
        }
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(CONSUMER_REGISTERS));
  // Consumers, from here on.
  const int g = lane >> 2, t = lane & 3;
  const int row_in_block = group * ROW_TILES * 64 + (warp & 3) * 16;
#if FORMAT == NF4
  const u32* table_lane = table + lane;
#endif
  u32 entry[4];  // where block j's word of this lane lies in a chunk
#pragma unroll
  for (int j = 0; j < 4; ++j) entry[j] = entry_of(g, j) * 16 + t * 4;
  float sum[ROW_TILES][ACCUMULATORS];
  const float gain = *global_scale;
  wait_for_prerequisites();

  int stage = 0, previous = -1, pack_stage = 0;
  u32 phase = 0, pack_phase = 0;
  // Start a fragment's products by the present stage of x; on return those of the fragment before
  // are done, so that its registers can be filled again.
  auto products = [&](float* d, const Fragment* a) {
    wgmma_fence();
    const u64 tile = describe(stage0 + stage * STAGE_BYTES);
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma(d, a[j], tile + 2 * j);  // 32 bytes on, in units of 16
    wgmma_commit();
    wgmma_wait<1>();
  };
  auto release = [&]() {  // the chunk before: its products are done
    if (previous >= 0 && lane == 0) barrier_arrive(empty0 + 8 * previous);
  };
  // Go to the next stage of x; the one left is released once the products that read it are done.
  auto advance = [&]() {
    previous = stage;
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  };

  // Four sums of 8 tokens: rows g and g + 8, tokens 2t and 2t + 1, out as 8 rows per store.
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
  constexpr int SLOTS = ROW_TILES * TOKENS / 8; // float4 per thread
  // Where block `owner` leaves a sum of its first shared tile or its second; lanes lie side by side.
  auto slot_of = [&](int owner, int second, int slot) {
    return (float4*)workspace + ((long long)(owner * 2 + second) * SLOTS + slot)
        * (CONSUMERS * 128) + thread;
  };
  // The consumers alone: the producer has no part in sums.
  auto meet = [&]() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS * 128) : "memory"); };

#if CLUSTER > 1
  auto meet_cluster = [&]() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  };
#endif

  int index = 0, shared_tiles = 0;
  int shared_tile[2];
  Segment s = plan.segment(block, 0);
  // Segment by segment: load codes, decode, multiply; then reduce and store.
  while (s.end > s.begin) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int i = 0; i < ACCUMULATORS; ++i) sum[r][i] = 0.0f;

    for (int pack = s.begin; pack < s.end; ++pack) {
      barrier_wait(packs_full0 + 8 * pack_stage, pack_phase);
      const u32 own = packs0 + pack_stage * PACKS_BYTES + (row_in_block / 16) * PACK_BYTES;
      // Load the scales of rows g and g + 8, all blocks of the pack.
      uint4 scales[ROW_TILES][2];
#pragma unroll
      for (int r = 0; r < ROW_TILES; ++r) {
        const u32 at = own + r * 4 * PACK_BYTES + 2048;
#if FORMAT == NF4
        scales[r][0] = load_shared16(at + g * 16);
        scales[r][1] = load_shared16(at + g * 16 + 128);
#else
        scales[r][0] = load_shared16(at + g * 32);
        scales[r][1] = load_shared16(at + g * 32 + 16);
#endif
      }
      Fragment a[2][4];  // products read one while the other is filled
      u32 words[4];
      auto load_words = [&](int part) {  // of chunk part / ROW_TILES, row tile part % ROW_TILES
#pragma unroll
        for (int j = 0; j < 4; ++j)
          words[j] = load_shared4(own + entry[j] + part % ROW_TILES * 4 * PACK_BYTES
                                  + part / ROW_TILES * 512);
      };
      // Decode the next fragments while the products of those before run.
      load_words(0);
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
#endif
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#if FORMAT == NF4
            fragment[j] = expand_codes(words[j], table_lane);
#else
            const uint4 both = scales[r][j >> 1];
            const uint2 block_scales = j & 1 ? make_uint2(both.z, both.w)
                                             : make_uint2(both.x, both.y);
            const u32 upper = expand_scale(block_scales, c, 0);
            const u32 lower = expand_scale(block_scales, c, 1);
            fragment[j] = expand_codes(words[j]);
#endif
            scale_fragment(fragment[j], upper, lower);
          }
          if (c * ROW_TILES + r + 1 < 4 * ROW_TILES) {
            load_words(c * ROW_TILES + r + 1);
          } else {
            __syncwarp();
            if (lane == 0) barrier_arrive(packs_empty0 + 8 * pack_stage);
          }
          // Multiply: (64, 64) of W by (64, TOKENS) of x^T.
          if (r == 0) barrier_wait(full0 + 8 * stage, phase);
          products(sum[r], fragment);
          if (r == 0) release();
        }
        advance();
      }
      if (++pack_stage == PACKS) { pack_stage = 0; pack_phase ^= 1; }
    }

    const int row_start = (s.tile / token_tiles) * BLOCK_ROWS + row_in_block;
    const int token_start = (s.tile % token_tiles) * TOKENS;
    wgmma_wait<0>();
    release();
    previous = -1;

#if CLUSTER > 1
    // All copies have landed and been used, so the rings' memory is free.
    meet();
    const u32 sums = stage0 + thread * 16;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
      for (int i = 0; i < TOKENS / 8; ++i)
        asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};"
                     :: "r"(sums + (r * (TOKENS / 8) + i) * CONSUMERS * 2048),
                        "f"(sum[r][i * 4]), "f"(sum[r][i * 4 + 1]), "f"(sum[r][i * 4 + 2]),
                        "f"(sum[r][i * 4 + 3]) : "memory");
    meet_cluster();
    // Reduce: each block adds up a slice of all blocks' sums, in order, and stores it.
    for (int slot = block % CLUSTER; slot < SLOTS; slot += CLUSTER) {
      const int token = token_start + (slot % (TOKENS / 8)) * 8;
      if (token >= M) continue;
      float4 part[CLUSTER];
#pragma unroll
      for (int owner = 0; owner < CLUSTER; ++owner) {
        u32 remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                     : "=r"(remote) : "r"(sums + slot * CONSUMERS * 2048), "r"(owner));
        asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(part[owner].x), "=f"(part[owner].y), "=f"(part[owner].z),
                       "=f"(part[owner].w) : "r"(remote) : "memory");
      }
      float v[4] = {};
#pragma unroll
      for (int owner = 0; owner < CLUSTER; ++owner) {
        v[0] += part[owner].x; v[1] += part[owner].y;
        v[2] += part[owner].z; v[3] += part[owner].w;
      }
      emit(row_start + slot / (TOKENS / 8) * 64, token, v);
    }
    meet_cluster();  // nobody leaves while its sums are read
    return;
#endif
    // A tile of this block alone is stored; a part of a shared one goes to the workspace.
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
      meet();
      if (thread == 0)
        asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;"
                     :: "l"(counters + 2 * stream_tile) : "memory");
      if (shared_tiles == 0) shared_tile[0] = stream_tile; else shared_tile[1] = stream_tile;
      ++shared_tiles;
    }
    s = plan.segment(block, ++index);
  }

  // Reduce the shared tiles: wait for all parts, add up a slice in order, store it.
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
    // The last to finish clears the counters for the next launch.
    if (thread == 0 && atomicAdd(counters + 2 * tile + 1, 1u) == (u32)sharers - 1) {
      counters[2 * tile] = 0;
      counters[2 * tile + 1] = 0;
      __threadfence();
    }
  }
}
