// Loops of one operation over files, by threads that start together.
//
//   loops pread PASSES THREADS FILE         blocks of 4 KiB in order; all threads on one descriptor
//   loops pwrite PASSES THREADS FILE...     the same, written in place; a file for each thread
//   loops open PASSES 1 LIST                opens each file that LIST names, reads 4 KiB, closes it
//
// Runs a few passes first. Then prints `ops N ns N cpu N` on standard error, and a sum of the bytes that were read
// on standard output.
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define WARM 4

static char what;
static long passes, blocks, names;
static char **name;
static int files[64];
static pthread_barrier_t ready;

// From when the first thread began until the last one was done, and the process's processor time then.
struct span {
    uint64_t from, to, cpu_from, cpu_to;
};
static struct span spans[64];

static void fail(const char *why) {
    perror(why);
    exit(1);
}

static uint64_t word(const char *block, ssize_t len) {
    uint64_t word = 0;
    memcpy(&word, block, len < 8 ? (size_t)len : 8);
    return word;
}

static uint64_t pass(long number, int file, char *block) {
    uint64_t sum = 0;
    if (what == 'o') {
        for (long i = 0; i < names; i++) {
            int opened = open(name[i], O_RDONLY);
            if (opened < 0) fail(name[i]);
            ssize_t len = read(opened, block, BLOCK);
            if (len < 0 || close(opened)) fail(name[i]);
            sum += word(block, len) + (uint64_t)len;
        }
        return sum;
    }
    for (long i = 0; i < blocks; i++) {
        if (what == 'r') {
            if (pread(file, block, BLOCK, i * BLOCK) != BLOCK) fail("pread");
            sum += word(block, BLOCK);
        } else {
            uint64_t stamp = (uint64_t)(number * blocks + i);
            memcpy(block, &stamp, sizeof stamp);
            if (pwrite(file, block, BLOCK, i * BLOCK) != BLOCK) fail("pwrite");
        }
    }
    return sum;
}

static uint64_t now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static void *work(void *argument) {
    struct span *span = argument;
    int file = files[span - spans];
    char *block = aligned_alloc(BLOCK, BLOCK);
    if (!block) fail("memory");
    memset(block, 1, BLOCK);
    uint64_t sum = 0;
    for (long i = 0; i < WARM; i++) sum += pass(i, file, block);
    pthread_barrier_wait(&ready);
    span->from = now(CLOCK_MONOTONIC), span->cpu_from = now(CLOCK_PROCESS_CPUTIME_ID);
    for (long i = 0; i < passes; i++) sum += pass(i, file, block);
    span->to = now(CLOCK_MONOTONIC), span->cpu_to = now(CLOCK_PROCESS_CPUTIME_ID);
    free(block);
    return (void *)sum;
}

static void read_names(const char *list) {
    FILE *stream = fopen(list, "r");
    char line[4096];
    if (!stream) fail(list);
    while (fgets(line, sizeof line, stream)) {
        line[strcspn(line, "\n")] = 0;
        name = realloc(name, sizeof *name * (size_t)(names + 1));
        name[names++] = strdup(line);
    }
    fclose(stream);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    what = !strcmp(argv[1], "pread") ? 'r' : !strcmp(argv[1], "pwrite") ? 'w' : 'o';
    passes = atol(argv[2]);
    long threads = atol(argv[3]);
    if (threads < 1 || threads > 64 || (what == 'w' && argc < 4 + threads)) return 2;
    if (what == 'o') read_names(argv[4]);
    for (long i = 0; i < threads && what != 'o'; i++) {
        files[i] = what == 'w'  ? open(argv[4 + i], O_RDWR)
                   : i == 0     ? open(argv[4], O_RDONLY)
                                : files[0];
        struct stat status;
        if (files[i] < 0 || fstat(files[i], &status)) fail(argv[4]);
        blocks = status.st_size / BLOCK;
    }
    pthread_t thread[64];
    pthread_barrier_init(&ready, NULL, (unsigned)threads);
    for (long i = 0; i < threads; i++) pthread_create(&thread[i], NULL, work, &spans[i]);
    struct span all = {UINT64_MAX, 0, UINT64_MAX, 0};
    uint64_t sum = 0;
    for (long i = 0; i < threads; i++) {
        void *part;
        pthread_join(thread[i], &part);
        sum += (uint64_t)part;
        if (spans[i].from < all.from) all.from = spans[i].from;
        if (spans[i].to > all.to) all.to = spans[i].to;
        if (spans[i].cpu_from < all.cpu_from) all.cpu_from = spans[i].cpu_from;
        if (spans[i].cpu_to > all.cpu_to) all.cpu_to = spans[i].cpu_to;
    }
    printf("%llu\n", (unsigned long long)sum);
    long ops = passes * threads * (what == 'o' ? names : blocks);
    fprintf(stderr, "ops %ld ns %llu cpu %llu\n", ops, (unsigned long long)(all.to - all.from),
            (unsigned long long)(all.cpu_to - all.cpu_from));
    return 0;
}
