// Experts without a frame that the host computes: how the device asks for them and takes the answers. One post is in flight at a time:
// a layer's is answered before the next layer's router runs. Words are laid out as `kernels::experts::mail` says.
#pragma once
#include "common.cuh"

// Mapped host memory: number of the post, bank, entries, then (expert, pick) of each entry, picks of an expert together.
enum { MAIL_POST = 0, MAIL_BANK = 1, MAIL_ENTRIES = 2, MAIL_LIST = 4, MAIL_REPLY = 128, MAIL_LATE = 160, MAIL_ACT = 256 };
// Device memory: posts so far, the post to wait for or 0, its entries, whether the host was late once, their picks.
enum { STATE_POSTS = 0, STATE_POST = 1, STATE_ENTRIES = 2, STATE_LATE = 3, STATE_PICKS = 4 };
#define HELP_EXPERTS 8
#define HELP_ENTRIES 32
// The host answers in less than a millisecond; a virtual machine may stand still for some.
#define HELP_BOUND_NS 2000000000ull

DEV void store_release_sys(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEV u32 load_acquire_sys(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 load_sys(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// By one warp of each block: waits for the host's answers if this layer asked, and puts them where the device's outputs are.
// y BF16 [picks][width]; `answers`: first word of theirs in `mail`. A host that was late is not waited for again: its round fails, and
// no other asks it.
DEV void take_answers(u32* mail, u32* state, int answers, u16* y, int width, int lane) {
  const u32 post = state[STATE_POST];
  if (!post || state[STATE_LATE]) return;
  const int per = width >> 3, pieces = (per + 127) >> 7, all = (int)state[STATE_ENTRIES] * pieces;
  if ((int)blockIdx.x >= all) return;
  if (lane == 0) {
    const u64 start = now_ns();
    while (load_acquire_sys(mail + MAIL_REPLY) != post)
      if (now_ns() - start > HELP_BOUND_NS) {
        store_release_sys(mail + MAIL_LATE, post);
        state[STATE_LATE] = 1;
        break;
      }
  }
  __syncwarp();
  for (int i = blockIdx.x; i < all; i += gridDim.x) {
    const int entry = i / pieces, at = (i - entry * pieces) * 128 + lane;
    const uint4* from = (const uint4*)(mail + answers) + (size_t)entry * per;
    uint4* to = (uint4*)(y + (size_t)state[STATE_PICKS + entry] * width);
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (at + 32 * k < per) v[k] = load_sys(from + at + 32 * k);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (at + 32 * k < per) to[at + 32 * k] = v[k];
  }
}
