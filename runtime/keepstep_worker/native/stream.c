/* Copies bytes with stores that go past the processor's caches: what a snapshot writes is read by nobody soon. The C library
 * does so only for blocks far larger than most variables are.
 *
 * In one of three ways, as the processor likes it. Four pages at a time, a line of each in turn, asked for in advance: the memory
 * has more to do at once. On Intel's Emerald Rapids one page after the other was measured to take 1.4 times as long, and 1.9
 * times where the lines were asked for in advance past the caches (PREFETCHNTA). Or straight on, a page after the other, and
 * nothing asked for: on AMD's Zen 4 four at a time were measured to take up to 1.4 times as long. Or that by whole lines, where
 * there is AVX-512: on AMD's Zen 5 quarters of lines take 1.1 times as long, or 1.05 where two threads share what the memory gives.
 *
 * Whoever gives the blocks does not wait for those who copy them, nor they for it: Python's threads wait for each other.
 *
 * Needs nothing else, the C library included, so that one build serves every image.
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

enum { LINE = 64, PAGE = 4096, PAGES = 4, AHEAD = 4 * LINE };

struct block {
    uint64_t to, from, size;
};

static inline void stream_line(char *to, const char *from)
{
    __m128i first = _mm_loadu_si128((const __m128i *)from);
    __m128i second = _mm_loadu_si128((const __m128i *)(from + 16));
    __m128i third = _mm_loadu_si128((const __m128i *)(from + 32));
    __m128i fourth = _mm_loadu_si128((const __m128i *)(from + 48));
    _mm_stream_si128((__m128i *)to, first);
    _mm_stream_si128((__m128i *)(to + 16), second);
    _mm_stream_si128((__m128i *)(to + 32), third);
    _mm_stream_si128((__m128i *)(to + 48), fourth);
}

__attribute__((target("avx512f"))) static size_t stream_whole_lines(char *to, const char *from, size_t size)
{
    size_t at = 0;
    for (; at + LINE <= size; at += LINE)
        _mm512_stream_si512((__m512i *)(to + at), _mm512_loadu_si512(from + at));
    return at;
}

enum { IN_FOURS, STRAIGHT, BY_WHOLE_LINES };

static void stream(char *to, const char *from, size_t size, int way)
{
    while (size > 0 && ((uintptr_t)to & (LINE - 1)) != 0) {
        *to++ = *from++;
        size--;
    }
    if (way == BY_WHOLE_LINES) {
        size_t done = stream_whole_lines(to, from, size);
        to += done;
        from += done;
        size -= done;
    }
    for (; way == IN_FOURS && size >= PAGES * PAGE; size -= PAGES * PAGE, to += PAGES * PAGE, from += PAGES * PAGE) {
        for (size_t at = 0; at < PAGE; at += LINE) {
            for (size_t page = at; page < PAGES * PAGE; page += PAGE)
                _mm_prefetch(from + page + AHEAD, _MM_HINT_T0);
            for (size_t page = at; page < PAGES * PAGE; page += PAGE)
                stream_line(to + page, from + page);
        }
    }
    for (; size >= LINE; size -= LINE, to += LINE, from += LINE)
        stream_line(to, from);
    while (size > 0) {
        *to++ = *from++;
        size--;
    }
}

enum { THREADS_MAX = 8 };
static const uint64_t NOWHERE = UINT64_MAX;

struct board {
    uint64_t taken, given, closed, left, threads, at[THREADS_MAX];
};

/* Py_buffer, as far as it matters here. */
struct buffer {
    void *address, *owner;
    int64_t size;
    char rest[128];
};

/* PyList_GetItem, PyObject_GetBuffer, PyBuffer_Release, PyErr_Clear. */
struct python {
    void *(*item)(void *list, int64_t at);
    int (*get)(void *object, struct buffer *buffer, int flags);
    void (*release)(struct buffer *buffer);
    void (*clear)(void);
};

struct place {
    uint64_t to, size;
};

/* Gives the bytes of a list's objects, which stay where they are while the objects are there, in blocks of `most` bytes, each
 * object's to its place; the number of each one's first block goes to `firsts`. Returns how many were given: all, or those
 * before the first that says nothing of its bytes or has not as many as its place. To be called with the interpreter held. */
uint64_t keepstep_give(void *list, uint64_t count, const struct place *places, uint64_t *firsts, struct block *blocks,
                       struct board *board, const struct python *python, uint64_t most)
{
    uint64_t given = board->given;

    for (uint64_t n = 0; n < count; n++) {
        void *object = python->item(list, (int64_t)n);
        struct buffer buffer;
        if (!object || python->get(object, &buffer, 0) != 0) {
            python->clear();
            return n;
        }
        uint64_t from = (uint64_t)(uintptr_t)buffer.address, size = (uint64_t)buffer.size;
        python->release(&buffer);
        if (size != places[n].size)
            return n;
        firsts[n] = given;
        for (uint64_t at = 0; at < size; at += most)
            blocks[given++] = (struct block){places[n].to + at, from + at, size - at < most ? size - at : most};
        __atomic_store_n(&board->given, given, __ATOMIC_RELEASE);
    }
    return count;
}

/* It has another name wherever what it takes is changed, so that a library that was compiled before is not called.
 *
 * Copies blocks from the first on while they are given, until there is none left and the board is closed. Several threads
 * may do this with the same board, at most THREADS_MAX: each block is copied by one of them, and is where it belongs when all
 * have returned. One that does not stay returns when the blocks before those that are left are where they belong: whoever
 * stays copies these. */
void keepstep_copy_in_a_way(const struct block *blocks, struct board *board, int way, int stays)
{
    uint64_t self = __atomic_fetch_add(&board->threads, 1, __ATOMIC_SEQ_CST);

    while (stays || __atomic_load_n(&board->taken, __ATOMIC_SEQ_CST) < __atomic_load_n(&board->left, __ATOMIC_SEQ_CST)) {
        uint64_t at = __atomic_fetch_add(&board->taken, 1, __ATOMIC_SEQ_CST);
        __atomic_store_n(&board->at[self], at, __ATOMIC_SEQ_CST);
        while (at >= __atomic_load_n(&board->given, __ATOMIC_ACQUIRE)) {
            if (__atomic_load_n(&board->closed, __ATOMIC_ACQUIRE) && at >= __atomic_load_n(&board->given, __ATOMIC_ACQUIRE))
                goto done;
            _mm_pause();
        }
        stream((char *)(uintptr_t)blocks[at].to, (const char *)(uintptr_t)blocks[at].from, blocks[at].size, way);
    }
done:
    _mm_sfence();
    __atomic_store_n(&board->at[self], NOWHERE, __ATOMIC_RELEASE);
    /* Who comes later than this thread takes none of those blocks. */
    for (uint64_t other = 0; !stays && other < __atomic_load_n(&board->threads, __ATOMIC_SEQ_CST); other++)
        while (__atomic_load_n(&board->at[other], __ATOMIC_ACQUIRE) < __atomic_load_n(&board->left, __ATOMIC_ACQUIRE))
            _mm_pause();
}
