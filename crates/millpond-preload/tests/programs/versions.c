/* One file, open several times in one process. Threads write versions to pages and read them by different
   descriptors, while another process opens and writes the file, so that it is handed over.
   `versions SEED STEPS`. A read must not return a version that is older than the last write that had returned before
   the read began, nor one that was not begun when the read returned. Prints nothing and returns 0 where that is so. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "check.h"

enum { ENDS = 6, WRITERS = 2, READERS = 2, OTHERS = 1, VERSIONS = 12, BULK = 8 << 20, WORDS = PAGE / 8 };

/* Shared with the other process: the versions of each page whose write has begun, and those whose write has
   returned. */
static struct board {
	_Atomic uint64_t begun[VERSIONS], done[VERSIONS];
	_Atomic int is_over, opens_asked;
} *board;

static int ends[ENDS];
/* Read by `read`, which holds its offset until it returns. */
static int bulk;
static uint64_t seed;
static int steps;

static uint64_t next(uint64_t *state)
{
	uint64_t word = *state += 0x9e3779b97f4a7c15u;
	word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
	word = (word ^ word >> 27) * 0x94d049bb133111ebu;
	return word ^ word >> 31;
}

static uint32_t pick(uint64_t *state, uint32_t below)
{
	return (next(state) >> 11) % below;
}

/* Called by the one thread that writes the page. */
static void put_version(int fd, int page, uint64_t *state)
{
	uint64_t words[WORDS], version = board->done[page] + 1;
	/* Each word of a page is its version. */
	for (int i = 0; i < WORDS; i++)
		words[i] = version;
	board->begun[page] = version;
	struct iovec vectors[2] = {{words, 64}, {words + 8, PAGE - 64}};
	off_t at = (off_t)page * PAGE;
	switch (pick(state, 3)) {
	case 0:
		CHECK(pwritev(fd, vectors, 2, at) == PAGE);
		break;
	default:
		CHECK(pwrite(fd, words, PAGE, at) == PAGE);
	}
	board->done[page] = version;
}

static void check_version(int fd, int page, uint64_t *state)
{
	uint64_t words[WORDS], least = board->done[page];
	off_t at = (off_t)page * PAGE;
	struct iovec vectors[2] = {{words, 64}, {words + 8, PAGE - 64}};
	if (pick(state, 4))
		CHECK(pread(fd, words, PAGE, at) == PAGE);
	else
		CHECK(preadv(fd, vectors, 2, at) == PAGE);
	uint64_t most = board->begun[page];
	for (int i = 0; i < WORDS; i++)
		if (words[i] < least || words[i] > most) {
			fprintf(stderr, "seed %lu: page %d, word %d: version %lu, not %lu to %lu\n", (unsigned long)seed,
				page, i, (unsigned long)words[i], (unsigned long)least, (unsigned long)most);
			_exit(1);
		}
}

static void *write_versions(void *argument)
{
	long own = (long)argument;
	uint64_t state = seed * 31 + own;
	while (!board->is_over) {
		/* Each page has one writer; any thread uses any descriptor. */
		int page = own + (WRITERS + OTHERS) * pick(&state, VERSIONS / (WRITERS + OTHERS));
		put_version(ends[pick(&state, ENDS / 2)], page, &state);
		if (pick(&state, 8) == 0)
			usleep(100);
		for (int i = pick(&state, 40); i > 0; i--)
			check_version(ends[ENDS / 2 + pick(&state, ENDS / 2)], pick(&state, VERSIONS), &state);
	}
	return NULL;
}

static void *read_versions(void *argument)
{
	uint64_t state = seed * 37 + (long)argument;
	while (!board->is_over) {
		check_version(ends[pick(&state, ENDS)], pick(&state, VERSIONS), &state);
		if (pick(&state, 50) == 0)
			usleep(100);
	}
	return NULL;
}

static void *read_bulk(void *argument)
{
	char *memory = malloc(BULK);
	while (!board->is_over) {
		CHECK(lseek(bulk, VERSIONS * PAGE, SEEK_SET) == VERSIONS * PAGE);
		CHECK(read(bulk, memory, BULK) == BULK);
		usleep(3000);
	}
	free(memory);
	return NULL;
}

/* Another process, forked before the file is open. The main thread requests each open, so that the file is served
   between the opens. */
static void disturb(void)
{
	uint64_t state = seed * 41;
	int opens = 0;
	while (!board->is_over) {
		if (opens == board->opens_asked) {
			usleep(200);
			continue;
		}
		opens++;
		int fd = open("f", pick(&state, 2) ? O_RDWR : O_RDONLY);
		CHECK(fd >= 0);
		int can_write = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR;
		for (int i = pick(&state, 6); i > 0; i--) {
			int page = WRITERS + (WRITERS + OTHERS) * pick(&state, VERSIONS / (WRITERS + OTHERS));
			if (can_write)
				put_version(fd, page, &state);
			check_version(fd, pick(&state, VERSIONS), &state);
		}
		CHECK(close(fd) == 0);
	}
}

/* Calls that hand the file over within the process. */
static void disturb_within(uint64_t *state)
{
	int other, fd = ends[pick(state, ENDS)];
	switch (pick(state, 3)) {
	case 0:
		CHECK((other = open("f", O_RDWR)) >= 0);
		check_version(other, pick(state, VERSIONS), state);
		CHECK(close(other) == 0);
		break;
	case 1:
		CHECK(fcntl(fd, F_SETFL, O_RDWR) == 0);
		break;
	default:
		CHECK(fsync(fd) == 0);
	}
}

int main(int count, char **arguments)
{
	static char zeros[BULK];
	seed = strtoull(arguments[1], NULL, 10);
	steps = atoi(arguments[2]);
	uint64_t state = seed;
	board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(board != MAP_FAILED);
	int made = open("f", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(made >= 0 && write(made, zeros, VERSIONS * PAGE) == VERSIONS * PAGE);
	CHECK(write(made, zeros, BULK) == BULK && close(made) == 0);
	pid_t other = fork();
	CHECK(other >= 0);
	if (other == 0) {
		CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
		disturb();
		_exit(0);
	}
	for (int i = 0; i < ENDS; i++) {
		CHECK((ends[i] = open("f", O_RDWR | O_CLOEXEC)) >= 0);
		/* Between the descriptors that writers use and the others. */
		if (i == ENDS / 2 - 1)
			CHECK((bulk = open("f", O_RDONLY | O_CLOEXEC)) >= 0);
	}
	pthread_t threads[WRITERS + READERS + 1];
	for (long i = 0; i < WRITERS; i++)
		CHECK(pthread_create(&threads[i], NULL, write_versions, (void *)i) == 0);
	for (long i = 0; i < READERS; i++)
		CHECK(pthread_create(&threads[WRITERS + i], NULL, read_versions, (void *)i) == 0);
	CHECK(pthread_create(&threads[WRITERS + READERS], NULL, read_bulk, NULL) == 0);
	for (int i = 0; i < steps; i++) {
		/* Reads and writes between the opens. */
		for (int j = 200 + pick(&state, 3000); j > 0; j--)
			check_version(ends[pick(&state, ENDS)], pick(&state, VERSIONS), &state);
		if (pick(&state, 6) == 0)
			disturb_within(&state);
		else
			board->opens_asked++;
	}
	board->is_over = 1;
	for (int i = 0; i < WRITERS + READERS + 1; i++)
		pthread_join(threads[i], NULL);
	int status;
	CHECK(waitpid(other, &status, 0) == other && status == 0);
	return 0;
}
