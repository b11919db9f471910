/* Copies bytes past the processor's caches: what a snapshot writes is read by nobody soon, and the training's own data
 * stay where they are. The C library does so only for blocks far larger than most variables are.
 *
 * Whoever gives the blocks does not wait for those who copy them, nor they for it: Python's threads wait for each other.
 *
 * Needs nothing else, the C library included, so that one build serves every image.
 */
#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>

enum { LINE = 64, AHEAD = 8 * LINE };

struct block {
    uint64_t to, from, size;
};

static void stream(char *to, const char *from, size_t size)
{
    while (size > 0 && ((uintptr_t)to & (LINE - 1)) != 0) {
        *to++ = *from++;
        size--;
    }
    for (; size >= LINE; size -= LINE, to += LINE, from += LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        __m128i first = _mm_loadu_si128((const __m128i *)from);
        __m128i second = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i third = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i fourth = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, first);
        _mm_stream_si128((__m128i *)(to + 16), second);
        _mm_stream_si128((__m128i *)(to + 32), third);
        _mm_stream_si128((__m128i *)(to + 48), fourth);
    }
    while (size > 0) {
        *to++ = *from++;
        size--;
    }
}

struct board {
    uint64_t taken, given, closed;
};

/* It has another name wherever what it takes is changed, so that a library that was compiled before is not called.
 *
 * Copies blocks from the first on while they are given, until there is none left and the board is closed. Several threads
 * may do this with the same board: each block is copied by one of them, and is where it belongs when all have returned. */
void keepstep_copy_given(const struct block *blocks, struct board *board)
{
    for (;;) {
        uint64_t at = __atomic_fetch_add(&board->taken, 1, __ATOMIC_RELAXED);
        while (at >= __atomic_load_n(&board->given, __ATOMIC_ACQUIRE)) {
            if (__atomic_load_n(&board->closed, __ATOMIC_ACQUIRE) &&
                at >= __atomic_load_n(&board->given, __ATOMIC_ACQUIRE)) {
                _mm_sfence();
                return;
            }
            _mm_pause();
        }
        stream((char *)(uintptr_t)blocks[at].to, (const char *)(uintptr_t)blocks[at].from, blocks[at].size);
    }
}
