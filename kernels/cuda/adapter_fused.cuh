// A LoRA update inside linear_narrow's launch: z = x A^T by the first blocks of the grid, and
// scaling * z B^T by one warp of each other block, into the sums of its rows.
//
// The first `helpers` blocks make z: 16 rows of A each, the columns cut into PARTS, so that a warp
// has one to five chunks of 64 columns. What they leave carries its own flag: each float lies
// beside the launch's number in one 64-bit word, so whoever needs it reads until the number is
// right, with no fence, counter or second trip through the L2 in between. Parts are added up by
// the reader, in a fixed order.
//
// state[0] is the number of the launch before, state[1] how many blocks have read it. The last one
// to read moves the number on, for the next launch, which reads it after griddepcontrol.wait.
//
// Blocks are dispatched in the order of their index, and a helper waits for nobody in its launch,
// so those that wait for z cannot keep it from being made.
//
// Macros: RANK (of one projection), PARTS, JOIN (how a block comes by its update, below), and
// linear_narrow's.

#define LATE 0   // the last warp, after its share of the columns
#define EXTRA 1  // a warp that does nothing else
#define STAGED 2 // as LATE, from shared memory, where B and what there is of z were put at the start
#define ALL_WARPS (WARPS + (JOIN == EXTRA))
#define JOINER (ALL_WARPS - 1)
#define TOKENS (TOKEN_TILES * 8)

// Words of z: [16 rows of A][part][token][rank in the tile].
__device__ __forceinline__ u64* word_of_z(u64* z, int tile, int part, int token) {
  return z + ((u64)(tile * PARTS + part) * TOKENS + token) * 16;
}

__device__ __forceinline__ ulonglong2 load_two_words(const u64* address) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1}, [%2];"
               : "=l"(v.x), "=l"(v.y) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ u32 load_number(const u32* state) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(state) : "memory");
  return v + 1;
}

// Note that this block has read the number; returns how many had before. The zero that is added
// depends on the number, so that the addition cannot go ahead of the reading; a fence would cost as
// much as the update.
__device__ __forceinline__ u32 note_reading(u32* state, u32 number, int M) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before) : "l"(state + 1), "r"(1 + (number & (u32)(M >> 30))) : "memory");
  return before;
}

__device__ __forceinline__ void move_on(u32* state, u32 before, u32 number) {
  if (before == gridDim.x - 1) {
    state[1] = 0;
    state[0] = number;
  }
}

struct Rows64 { uint4 v[4]; };  // rows g and g + 8, 16 columns of a chunk of 64

__device__ __forceinline__ Rows64 load_rows(const u16* upper, const u16* lower, int chunk, int t,
                                            int K) {
  Rows64 w = {};
  if (!TAIL || chunk * 64 + t * 16 < K) {
    w.v[0] = load_weights16(upper + chunk * 64); w.v[1] = load_weights16(upper + chunk * 64 + 8);
    w.v[2] = load_weights16(lower + chunk * 64); w.v[3] = load_weights16(lower + chunk * 64 + 8);
  }
  return w;
}

// What a helper block does. `partial` is ALL_WARPS x TOKENS x `stride` floats of shared memory.
__device__ __forceinline__ void make_z(float* partial, int stride, const u16* x, const u16* a,
                                       u64* z, u32* state, int M, int K, int x_stride) {
  __shared__ u32 number_shared;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
  const int chunks = (K + 63) / 64, step = ALL_WARPS * PARTS;
  const u16* upper = a + (u64)(tile * 16 + g) * K + t * 16;
  const u16* lower = upper + (u64)8 * K;
  // Load the first chunk of A and prefetch the others, ahead of the wait for x.
  int chunk = warp * PARTS + part;
  Rows64 w = {};
  if (chunk < chunks) w = load_rows(upper, lower, chunk, t, K);
  for (int c = chunk + step; c < chunks; c += step)
    if (!TAIL || c * 64 + t * 16 < K) { prefetch(upper + c * 64); prefetch(lower + c * 64); }
  wait_for_prerequisites();
  if (threadIdx.x == 0) number_shared = load_number(state);
  const u16* rows[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n) rows[n] = x + (u64)min(n * 8 + g, M - 1) * x_stride;
  // Multiply A by x, a chunk of 64 columns per turn.
  float sum[TOKEN_TILES][4] = {};
  for (bool first = true; chunk < chunks; chunk += step, first = false) {
    if (!first) w = load_rows(upper, lower, chunk, t, K);
    const Tokens xs = load_tokens(rows, chunk * 64 + t * 16, K);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Fragment f;
      f.r[0] = word_of(w.v[0], j);
      f.r[1] = word_of(w.v[2], j);
      f.r[2] = word_of(w.v[1], j);
      f.r[3] = word_of(w.v[3], j);
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; ++n)
        mma_bf16(sum[n], f, xs.pair[n][j], xs.pair[n][j + 4]);
    }
  }
  // Reduce over the warps in shared memory, then store z with the launch's number.
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = n * 8 + 2 * t + (i & 1);
      if (token < M) partial[(warp * TOKENS + token) * stride + g + 8 * (i >> 1)] = sum[n][i];
    }
  __syncthreads();
  const u32 number = number_shared;
  for (int i = threadIdx.x; i < M * 16; i += ALL_WARPS * 32) {
    const int token = i >> 4, rank = i & 15;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < ALL_WARPS; ++w) total += partial[(w * TOKENS + token) * stride + rank];
    const u64 word = (u64)number << 32 | __float_as_uint(total);
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;"
                 :: "l"(word_of_z(z, tile, part, token) + rank), "l"(word) : "memory");
  }
  if (threadIdx.x == 0) move_on(state, note_reading(state, number, M), number);
}

__device__ __forceinline__ void copy16_to_shared(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
               :: "r"((u32)__cvta_generic_to_shared(target)), "l"(source) : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

#if JOIN == STAGED
#define STAGED_ROWS ROW_TILES * 16
struct Staged {
  u64 z[RANK / 16 * PARTS * TOKENS * 16];  // of the projection of the block's first row
  u16 b[STAGED_ROWS * RANK];
  u32 state[4];
};

__device__ __forceinline__ void stage_b(Staged& staged, const u16* b, int row0, int N, int lane) {
  for (int i = lane; i < STAGED_ROWS * RANK / 8; i += 32)
    if (row0 + i * 8 / RANK < N) copy16_to_shared(staged.b + i * 8, b + (u64)row0 * RANK + i * 8);
}

__device__ __forceinline__ void stage_z(Staged& staged, u64* z, const u32* state, int projection,
                                        int M, int lane) {
  if (lane == 0) copy16_to_shared(staged.state, state);
  for (int i = lane; i < RANK / 16 * PARTS * TOKENS * 8; i += 32)
    if ((i >> 3) % TOKENS < M)
      copy16_to_shared(staged.z + i * 2,
                       word_of_z(z, projection * (RANK / 16), 0, 0) + i * 2);
}
#else
struct Staged {};
#endif

struct Projections {
  int end0, end1;
  __device__ int of(int row) const { return (row >= end0) + (row >= end1); }
};

// B's rows of a block and z against them, into `sum`; reads z until it is complete.
__device__ __forceinline__ void add_update(float (*sum)[TOKEN_TILES][4], const u16* b, u64* z,
                                           u32 number, float factor, int row0, int M, int N,
                                           Projections ends, const Staged& staged) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  constexpr int STEPS = RANK / 16;
  constexpr int GROUP = JOIN == EXTRA && STEPS % 2 == 0 && TOKEN_TILES * PARTS <= 2 ? 2 : 1;  // bounds registers
#pragma unroll
  for (int r = 0; r < ROW_TILES; ++r) {
    const int row = row0 + r * 16;
    const int first = ends.of(row) * STEPS;
    // Find B's rows g and g + 8, and whether the staged z is that of their projection.
#if JOIN == STAGED
    const u16* upper = staged.b + (r * 16 + g) * RANK + 2 * t;  // past N: never stored
    const u16* lower = upper + 8 * RANK;
    bool near = ends.of(row) == ends.of(row0);
#else
    const u16* upper = b + (u64)min(row + g, N - 1) * RANK + 2 * t;
    const u16* lower = b + (u64)min(row + g + 8, N - 1) * RANK + 2 * t;
#endif
    // Go through the ranks, 16 per step, GROUP steps at once.
#pragma unroll(STEPS <= 2 ? STEPS : 1)
    for (int s = 0; s < STEPS; s += GROUP) {
      Fragment f[GROUP];
      auto load_b = [&]() {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          f[i].r[0] = *(const u32*)(upper + (s + i) * 16);
          f[i].r[1] = *(const u32*)(lower + (s + i) * 16);
          f[i].r[2] = *(const u32*)(upper + (s + i) * 16 + 8);
          f[i].r[3] = *(const u32*)(lower + (s + i) * 16 + 8);
        }
      };
      if (JOIN == EXTRA) load_b();  // it has time; the others, no registers to spare
      ulonglong2 v[GROUP][TOKEN_TILES][PARTS][2];
      // Load the parts of z, again until every word carries the launch's number.
      for (;;) {
        bool there = true;
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int token = min(n * 8 + g, M - 1), rank = 8 * h + 2 * t;
#if JOIN == STAGED
                if (near) {
                  v[i][n][p][h] = *(const ulonglong2*)(
                      staged.z + (((s + i) * PARTS + p) * TOKENS + token) * 16 + rank);
                  continue;
                }
#endif
                v[i][n][p][h] = load_two_words(word_of_z(z, first + s + i, p, token) + rank);
              }
#pragma unroll
        for (int i = 0; i < GROUP; ++i)
#pragma unroll
          for (int n = 0; n < TOKEN_TILES; ++n)
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
              for (int h = 0; h < 2; ++h)
                there = there && (u32)(v[i][n][p][h].x >> 32) == number
                              && (u32)(v[i][n][p][h].y >> 32) == number;
        if (__all_sync(0xFFFFFFFFu, there)) break;
        // What was staged too early is read again, from where it is written.
#if JOIN == STAGED
        if (near) { near = false; continue; }
#endif
        __nanosleep(20);
      }
      // Reduce the parts in order, scale, round to bf16, and multiply B by them.
      if (JOIN != EXTRA) load_b();
#pragma unroll
      for (int i = 0; i < GROUP; ++i)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; ++n) {
          u32 pair[2];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float low = 0.0f, high = 0.0f;
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
              low += __uint_as_float((u32)v[i][n][p][h].x);
              high += __uint_as_float((u32)v[i][n][p][h].y);
            }
            pair[h] = pack_bf16x2(low * factor, high * factor);
          }
          mma_bf16(sum[r][n], f[i], pair[0], pair[1]);
        }
    }
  }
}
