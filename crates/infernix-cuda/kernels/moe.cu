// Router: exact top-k on FP32 logits (lower id on equality), softmax over the selected, and the job list of the experts.
#include "help.cuh"
#include "w4a4.cuh"

DEV u32 order_bits(float f) {
  u32 b = __float_as_uint(f);
  return b & 0x80000000u ? ~b : b | 0x80000000u;  // monotone; -0 < +0 is harmless: logits of -0 tie with nothing else exactly
}

// The best `top` of a row of E <= 32 NL logits by one warp: lane k < top gets the id of rank k and its weight.
template <int NL> DEV void select_top(const float* __restrict__ row, int E, int top, int lane, int& my_id, float& my_weight) {
  u32 v[NL];
#pragma unroll
  for (int i = 0; i < NL; i++) {
    const int e = i * 32 + lane;
    // Adding zero makes -0 into +0, so that the two are equal as the comparison of floats says.
    v[i] = e < E ? order_bits(row[e] + 0.0f) : 0;
  }
  u32 taken = 0;
  float best = 0, mine = 0, sum = 0;
  my_id = 0;
  for (int r = 0; r < top; r++) {
    u32 m = 0;
    int mi = 0;
#pragma unroll
    for (int i = 0; i < NL; i++)  // a bound of E / 32 here is slower (4.4 against 3.5 us): the search no longer unrolls
      if (!((taken >> i) & 1) && v[i] > m) m = v[i], mi = i;
    const u32 top_v = __reduce_max_sync(~0u, m);
    const u32 id = m == top_v ? (u32)(mi * 32 + lane) : 0xffffffffu;
    const u32 win = __reduce_min_sync(~0u, id);
    if (win == id && m == top_v) taken |= 1u << mi;
    const u32 b = top_v & 0x80000000u ? top_v & 0x7fffffffu : ~top_v;
    const float l = __uint_as_float(b);
    if (r == 0) best = l;
    const float e = expf(l - best);
    sum += e;
    if (lane == r) mine = e, my_id = (int)win;
  }
  my_weight = mine / sum;
}
DEV void select_row(const float* row, int E, int top, int lane, int& id, float& weight) {
  if (E <= 512) select_top<16>(row, E, top, lane, id, weight);
  else select_top<32>(row, E, top, lane, id, weight);
}

// One warp a row. logits [rows][pitch], E <= 1024, top <= 32. ids and weights [rows][top], rank order.
extern "C" __global__ void __launch_bounds__(128) router_topk(const float* __restrict__ logits, int E, int pitch, int rows, int top,
                                                              int* __restrict__ ids, float* __restrict__ weights) {
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  int id;
  float weight;
  select_row(logits + (size_t)row * pitch, E, top, lane, id, weight);
  if (lane < top) ids[row * top + lane] = id, weights[row * top + lane] = weight;
}

// Quantises the input `x` [K] of one pick for gate/up of its expert, by the whole block: K codes, then K/16 pairs of scale and
// correction.
DEV void quantise_pick(const u16* __restrict__ x, float gs, u8* __restrict__ o, int K, int divisor) {
  const int t = threadIdx.x, lane = t & 31, tasks = K >> 2;
  for (int t0 = t & ~31; t0 < tasks; t0 += blockDim.x) {
    const int e = min(t0 + lane, tasks - 1);
    const uint2 w = *(const uint2*)(x + e * 4);
    const float v[4] = {bf_lo(w.x), bf_hi(w.x), bf_lo(w.y), bf_hi(w.y)};
    u32 codes;
    int sc, corr;
    quant_block(v, gs, divisor, codes, sc, corr);
    if (t0 + lane < tasks) {
      *(u32*)(o + e * 4) = codes;
      if ((e & 3) == 0) *(int2*)(o + K + (e >> 2) * 8) = make_int2(sc, corr);
    }
  }
}

// What a layer asks of the host, see help.cuh. `split`: four bits for each number of experts without a frame, from none on: how many
// of them the host computes. `mail` is null where it computes none.
struct Help {
  const u32* away;  // of each expert: it has no frame
  u32 *mail, *state;
  u64 split;
  int bank;
};
struct Asked {
  int picks[HELP_ENTRIES], experts[HELP_ENTRIES];
  int n[HELP_EXPERTS];
};

// Chooses the experts that the host computes, by the block; `c`: picks of the thread's expert. Gives the entries of the post, and
// whether the thread's expert is of them.
DEV int ask_host(const Help& h, const int* ids, int picks, int c, u32 away, Asked& asked, int* warps, bool& mine) {
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const bool miss = c > 0 && away != 0;
  const int misses = __syncthreads_count(miss), experts = min((int)(h.split >> (4 * min(misses, 15))) & 15, HELP_EXPERTS);
  mine = false;
  if (experts == 0) {
    if (t == 0) h.state[STATE_POST] = 0;
    return 0;
  }
  const u32 vote = __ballot_sync(~0u, miss);
  if (lane == 0) warps[warp] = __popc(vote);
  __syncthreads();
  int rank = __popc(vote & ((1u << lane) - 1));
  for (int w = 0; w < warp; w++) rank += warps[w];
  mine = miss && rank < experts;
  if (mine) asked.n[rank] = c;
  __syncthreads();
  int entries = 0, first = 0;
  for (int r = 0; r < experts; r++) {
    if (r == rank) first = entries;
    entries += asked.n[r];
  }
  if (mine)
    for (int q = 0, k = first; q < picks; q++)
      if (ids[q] == t) {
        asked.picks[k] = q, asked.experts[k] = t;
        h.mail[MAIL_LIST + 2 * k] = t, h.mail[MAIL_LIST + 2 * k + 1] = q;
        h.state[STATE_PICKS + k] = q;
        k++;
      }
  __syncthreads();
  return entries;
}

// Groups the picks of all rows by expert, by a block of 1024. A job is one expert with at most `width` picks; jobs ascend by expert,
// picks of a job by (row, rank). Pick p = row * top + rank.
//   jobs [n][4]: expert, first entry of `list`, picks, 0;  count[0] = jobs, count[1] = picks
// Picks that the host computes are in no job. `ask` (entries of a post) is called where it is known what they are.
template <class F>
DEV void group_picks(const int* ids, int picks, int width, int* __restrict__ jobs, int* __restrict__ list, int* __restrict__ count,
                     const Help* help, u32 away, F ask) {
  __shared__ Asked asked;
  __shared__ int n[1024], base[1024], warp_a[32], warp_b[32];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  n[t] = 0;
  __syncthreads();
  for (int p = t; p < picks; p += 1024) atomicAdd(&n[ids[p]], 1);
  __syncthreads();
  int c = n[t], entries = 0;
  bool mine = false;
  if (help) {
    entries = ask_host(*help, ids, picks, c, away, asked, warp_a, mine);
    if (entries) ask(asked, entries);
    if (mine) c = 0;
  }
  const int j = (c + width - 1) / width;
  int a = c, b = j;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const int x = __shfl_up_sync(~0u, a, o), y = __shfl_up_sync(~0u, b, o);
    if (lane >= o) a += x, b += y;
  }
  if (lane == 31) warp_a[warp] = a, warp_b[warp] = b;
  __syncthreads();
  if (warp == 0) {
    int x = warp_a[lane], y = warp_b[lane];
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const int p = __shfl_up_sync(~0u, x, o), q = __shfl_up_sync(~0u, y, o);
      if (lane >= o) x += p, y += q;
    }
    warp_a[lane] = x, warp_b[lane] = y;
  }
  __syncthreads();
  a += warp ? warp_a[warp - 1] : 0, b += warp ? warp_b[warp - 1] : 0;
  base[t] = mine ? -1 : a - c;
  if (t == 1023) count[0] = b, count[1] = a;
  for (int k = 0; k < j; k++) {
    int* d = jobs + (size_t)(b - j + k) * 4;
    d[0] = t, d[1] = a - c + k * width, d[2] = min(width, c - k * width), d[3] = 0;
  }
  __syncthreads();
  // Stable: the place of a pick is the number of earlier picks of its expert.
  for (int p = t; p < picks; p += 1024) {
    const int e = ids[p];
    if (base[e] < 0) continue;
    int before = 0;
    if (n[e] > 1)
      for (int q = 0; q < p; q++) before += ids[q] == e;
    list[base[e] + before] = p;
  }
  if (entries) {
    __threadfence_system();
    __syncthreads();
    if (t == 0) {
      u32 post = help->state[STATE_POSTS] + 1;
      post = post ? post : 1;
      help->state[STATE_POSTS] = help->state[STATE_POST] = post, help->state[STATE_ENTRIES] = entries;
      help->mail[MAIL_BANK] = help->bank, help->mail[MAIL_ENTRIES] = entries;
      __threadfence_system();
      store_release_sys(help->mail + MAIL_POST, post);
    }
  }
}

// Block `picks`: the jobs. Block p < picks: quantises the input of pick p (x BF16 [picks/top][K]; act: a pick's codes and scales,
// padded to 16 bytes).
extern "C" __global__ void __launch_bounds__(1024) group_experts(const int* __restrict__ ids, int picks, int E, int width, int* __restrict__ jobs,
                                                                 int* __restrict__ list, int* __restrict__ count, const u16* __restrict__ x,
                                                                 const float* __restrict__ in_scale, u8* __restrict__ act, int K, int top, int divisor) {
  pdl_launch();
  pdl_wait();
  const int p = blockIdx.x;
  if (p + 1 < (int)gridDim.x) quantise_pick(x + (size_t)(p / top) * K, in_scale[ids[p] * 3], act + (size_t)p * ((K + K / 2 + 15) & ~15), K, divisor);
  else group_picks(ids, picks, width, jobs, list, count, nullptr, 0, [](const Asked&, int) {});
}

// The same behind the selection of each row's experts from its logits, which is done here: every block selects for itself. At most 32
// rows. `forced` I32 [rows][top] or null: experts of a synthetic law, which take the place of the selected ones, all of equal weight.
extern "C" __global__ void __launch_bounds__(1024) route_experts(const float* __restrict__ logits, int pitch, int picks, int E, int width,
                                                                 const int* __restrict__ forced, int* __restrict__ ids, float* __restrict__ weights,
                                                                 int* __restrict__ jobs, int* __restrict__ list, int* __restrict__ count,
                                                                 const u16* __restrict__ x, const float* __restrict__ in_scale, u8* __restrict__ act,
                                                                 int K, int top, int divisor, const u32* __restrict__ away, u32* mail,
                                                                 u32* state, u64 split, int bank) {
  __shared__ int all[1024];
  pdl_launch();
  const int p = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool last = p + 1 == (int)gridDim.x;
  // The table of frames is of before the round: it need not wait for the kernel before.
  const u32 absent = last && mail && (int)threadIdx.x < E ? __ldcg(away + threadIdx.x) : 0;
  pdl_wait();
  const int row = last ? warp : p / top;
  if (last ? row * top < picks : warp == 0) {
    int id;
    float weight;
    select_row(logits + (size_t)row * pitch, E, top, lane, id, weight);
    if (forced && lane < top) id = forced[row * top + lane], weight = 1.0f / (float)top;
    if (lane < top) {
      all[last ? row * top + lane : lane] = id;
      if (last) ids[row * top + lane] = id, weights[row * top + lane] = weight;
    }
  }
  __syncthreads();
  if (!last) quantise_pick(x + (size_t)row * K, in_scale[all[p - row * top] * 3], act + (size_t)p * ((K + K / 2 + 15) & ~15), K, divisor);
  else {
    const Help help = {away, mail, state, split, bank};
    const int size = (K + K / 2 + 15) & ~15;
    // Inputs go out as soon as it is known whose, to be on their way while the jobs are made.
    auto ask = [&](const Asked& a, int entries) {
      for (int k = 0; k < entries; k++)
        quantise_pick(x + (size_t)(a.picks[k] / top) * K, in_scale[a.experts[k] * 3], (u8*)(mail + MAIL_ACT) + (size_t)k * size, K, divisor);
    };
    group_picks(all, picks, width, jobs, list, count, mail ? &help : nullptr, absent, ask);
  }
}
