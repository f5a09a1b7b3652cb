/* Linux AIO: one scenario each, by name. Prints nothing and returns 0 if all results are the kernel's.
 *
 * aio syscall|libaio SCENARIO DIR: system calls by number, or the functions of libaio; DIR is a directory that is
 * not served. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { MANY = 64 };

typedef struct iocb Block;
typedef struct io_event Event;
typedef unsigned long Context;

/* All these functions return the negative errno, as libaio does. */
static int (*lib_setup)(int, Context *);
static int (*lib_destroy)(Context);
static int (*lib_submit)(Context, long, Block **);
static int (*lib_cancel)(Context, Block *, Event *);
static int (*lib_getevents)(Context, long, long, Event *, struct timespec *);
static int (*lib_pgetevents)(Context, long, long, Event *, struct timespec *, sigset_t *);

static const char *aside;

static int told(long result) { return result < 0 ? -errno : (int)result; }

static int setup(int capacity, Context *context)
{
	if (lib_setup)
		return lib_setup(capacity, context);
	return told(syscall(SYS_io_setup, capacity, context));
}

static int destroy(Context context)
{
	return lib_destroy ? lib_destroy(context) : told(syscall(SYS_io_destroy, context));
}

static int submit(Context context, long count, Block **blocks)
{
	if (lib_submit)
		return lib_submit(context, count, blocks);
	return told(syscall(SYS_io_submit, context, count, blocks));
}

static int cancel(Context context, Block *block, Event *event)
{
	if (lib_cancel)
		return lib_cancel(context, block, event);
	return told(syscall(SYS_io_cancel, context, block, event));
}

static int getevents(Context context, long min, long max, Event *events, struct timespec *timeout)
{
	if (lib_getevents)
		return lib_getevents(context, min, max, events, timeout);
	return told(syscall(SYS_io_getevents, context, min, max, events, timeout));
}

static int pgetevents(Context context, long min, long max, Event *events, struct timespec *timeout,
                      sigset_t *mask)
{
	struct {
		sigset_t *mask;
		size_t bytes;
	} arg = { mask, 8 };
	if (lib_pgetevents)
		return lib_pgetevents(context, min, max, events, timeout, mask);
	return told(syscall(333, context, min, max, events, timeout, &arg));
}

static void use_libaio(void)
{
	/* Looks the function up as a program's own reference to it would bind. */
	CHECK(dlopen("libaio.so.1", RTLD_NOW | RTLD_GLOBAL));
	CHECK((lib_setup = dlsym(RTLD_DEFAULT, "io_setup")));
	CHECK((lib_destroy = dlsym(RTLD_DEFAULT, "io_destroy")));
	CHECK((lib_submit = dlsym(RTLD_DEFAULT, "io_submit")));
	CHECK((lib_cancel = dlsym(RTLD_DEFAULT, "io_cancel")));
	CHECK((lib_getevents = dlsym(RTLD_DEFAULT, "io_getevents")));
	CHECK((lib_pgetevents = dlsym(RTLD_DEFAULT, "io_pgetevents")));
}

static Context context_for(int capacity)
{
	Context context = 0;
	CHECK(setup(capacity, &context) == 0 && context != 0);
	return context;
}

/* A file whose page i is all `first + i`. */
static int make(const char *dir, const char *name, int first, int flags)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/%s", dir, name);
	make_pages(path, first);
	int fd = open(path, flags);
	if (fd < 0 && errno == EINVAL && flags & O_DIRECT)
		fd = open(path, flags & ~O_DIRECT);
	CHECK(fd >= 0);
	return fd;
}

static void prepare(Block *block, int opcode, int fd, void *memory, size_t len, long offset)
{
	memset(block, 0, sizeof *block);
	block->aio_lio_opcode = opcode;
	block->aio_fildes = fd;
	block->aio_buf = (uintptr_t)memory;
	block->aio_nbytes = len;
	block->aio_offset = offset;
	block->aio_data = (uintptr_t)block ^ 0x5aa5;
}

/* Submits one request, and returns its result. */
static long do_one_at(int line, Context context, Block *block)
{
	Event event;
	int submitted = submit(context, 1, &block);
	if (submitted < 0)
		return submitted;
	int got = submitted == 1 ? getevents(context, 1, 1, &event, NULL) : 0;
	if (got != 1)
		fprintf(stderr, "in line %d: %d submitted, %d came\n", line, submitted, got);
	CHECK(got == 1);
	CHECK(event.obj == (uintptr_t)block && event.data == block->aio_data && event.res2 == 0);
	return event.res;
}

#define do_one(...) do_one_at(__LINE__, __VA_ARGS__)

static long one_at(int line, Context context, int opcode, int fd, void *memory, size_t len, long offset)
{
	Block block;
	prepare(&block, opcode, fd, memory, len, offset);
	return do_one_at(line, context, &block);
}

#define one(...) one_at(__LINE__, __VA_ARGS__)

static char *memory_of(size_t bytes)
{
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	return memory;
}

static Block blocks[4096];
static Block *pointers[4096];

/* Files that are served and files that are not, in one context, one submission, one wait. */
static void mixed(void)
{
	int fds[] = { make(".", "a", 0, O_RDONLY), make(aside, "b", 100, O_RDONLY),
	              make(".", "c", 50, O_RDONLY | O_DIRECT), make(".", "d", 9, O_RDWR) };
	int firsts[] = { 0, 100, 50, 9 };
	Context context = context_for(MANY);
	char *memory = memory_of(MANY * PAGE);
	Event events[MANY];
	for (int round = 0; round < 40; round++) {
		for (int i = 0; i < MANY; i++) {
			int page = (i * 7 + round * 13) % PAGES;
			prepare(&blocks[i], IOCB_CMD_PREAD, fds[i * 5 % 7 % 4], memory + i * PAGE, PAGE,
			        (long)page * PAGE);
			pointers[i] = &blocks[i];
		}
		CHECK(submit(context, MANY, pointers) == MANY);
		CHECK(getevents(context, MANY, MANY, events, NULL) == MANY);
		char seen[MANY] = { 0 };
		for (int e = 0; e < MANY; e++) {
			Block *block = (Block *)(uintptr_t)events[e].obj;
			long i = block - blocks;
			CHECK(i >= 0 && i < MANY && !seen[i]++);
			CHECK(events[e].data == block->aio_data && events[e].res == PAGE);
			CHECK(is_all(memory + i * PAGE, PAGE,
			             firsts[i * 5 % 7 % 4] + block->aio_offset / PAGE));
		}
	}
	CHECK(destroy(context) == 0);
}

/* The eventfd counts completions; each counted completion can be taken. */
static void eventfds(void)
{
	int fds[] = { make(".", "a", 0, O_RDONLY), make(aside, "b", 100, O_RDONLY) };
	int efd = eventfd(0, 0);
	CHECK(efd >= 0);
	Context context = context_for(MANY);
	char *memory = memory_of(MANY * PAGE);
	Event events[MANY];
	for (int i = 0; i < MANY; i++) {
		prepare(&blocks[i], IOCB_CMD_PREAD, fds[i % 2], memory + i * PAGE, PAGE, (long)i * PAGE);
		blocks[i].aio_flags = IOCB_FLAG_RESFD;
		blocks[i].aio_resfd = efd;
		pointers[i] = &blocks[i];
	}
	CHECK(submit(context, MANY, pointers) == MANY);
	struct timespec now = { 0, 0 };
	for (uint64_t left = MANY, count; left > 0; left -= count) {
		CHECK(read(efd, &count, sizeof count) == sizeof count && count <= left);
		CHECK(getevents(context, count, count, events, &now) == (int)count);
	}
	for (int i = 0; i < MANY; i++)
		CHECK(is_all(memory + i * PAGE, PAGE, i % 2 * 100 + i));
	/* These descriptors are no eventfds. */
	blocks[0].aio_resfd = 9999;
	CHECK(submit(context, 1, pointers) == -EBADF);
	blocks[0].aio_resfd = fds[1];
	CHECK(submit(context, 1, pointers) == -EINVAL);
	CHECK(getevents(context, 0, 1, events, &now) == 0);
	CHECK(destroy(context) == 0);
}

static volatile sig_atomic_t alarms;

static void on_alarm(int signal) { alarms++; }

/* The number of completions to wait for, the timeout, and the effect of a signal. */
static void waits(void)
{
	int fd = make(".", "a", 0, O_RDONLY);
	Context context = context_for(MANY);
	char *memory = memory_of(MANY * PAGE);
	Event events[MANY];
	struct timespec now = { 0, 0 }, moment = { 0, 20000000 };
	CHECK(getevents(context, 0, 1, events, NULL) == 0);
	CHECK(getevents(context, 1, 1, events, &now) == 0);
	CHECK(getevents(context, 1, 1, events, &moment) == 0);
	CHECK(getevents(context, 2, 1, events, &moment) == -EINVAL);
	CHECK(getevents(context, -1, 1, events, &moment) == -EINVAL);
	for (int i = 0; i < 8; i++) {
		prepare(&blocks[i], IOCB_CMD_PREAD, fd, memory + i * PAGE, PAGE, (long)i * PAGE);
		pointers[i] = &blocks[i];
	}
	CHECK(submit(context, 5, pointers) == 5);
	CHECK(getevents(context, 2, 2, events, NULL) == 2);
	CHECK(getevents(context, 3, MANY, events, NULL) == 3);
	/* Fewer completions than requested, at the timeout. */
	CHECK(submit(context, 2, pointers) == 2);
	int got = getevents(context, 8, MANY, events, &moment);
	CHECK(got >= 0 && got <= 2);
	CHECK(getevents(context, 2 - got, MANY, events, NULL) == 2 - got);

	struct sigaction action = { .sa_handler = on_alarm };
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	struct itimerval often = { { 0, 5000 }, { 0, 5000 } }, never = { 0 };
	CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
	CHECK(getevents(context, 1, 1, events, NULL) == -EINTR && alarms > 0);
	/* The requests in flight complete nevertheless. */
	for (int round = 0; round < 200; round++) {
		for (int i = 0; i < 8; i++)
			blocks[i].aio_offset = (long)((round * 8 + i) % PAGES) * PAGE;
		CHECK(submit(context, 8, pointers) == 8);
		for (int left = 8; left > 0;) {
			int got = getevents(context, left, left, events, NULL);
			CHECK(got > 0 || got == -EINTR);
			left -= got > 0 ? got : 0;
		}
	}
	CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);

	/* The call's mask applies during its wait. */
	sigset_t blocked, none;
	sigemptyset(&none);
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGALRM);
	CHECK(sigprocmask(SIG_BLOCK, &blocked, NULL) == 0);
	alarms = 0;
	CHECK(raise(SIGALRM) == 0 && alarms == 0);
	CHECK(pgetevents(context, 1, 1, events, NULL, &none) == -EINTR && alarms == 1);
	CHECK(raise(SIGALRM) == 0);
	CHECK(pgetevents(context, 1, 1, events, &moment, NULL) == 0 && alarms == 1);
	CHECK(submit(context, 1, pointers) == 1);
	CHECK(pgetevents(context, 1, 1, events, NULL, &blocked) == 1 && alarms == 1);
	CHECK(sigprocmask(SIG_UNBLOCK, &blocked, NULL) == 0 && alarms == 2);
	CHECK(destroy(context) == 0);
}

/* Every operation, and the resulting bytes of the file. */
static void operations(void)
{
	int fd = make(".", "a", 0, O_RDWR);
	Context context = context_for(8);
	char *memory = memory_of(64 * PAGE), *other = memory_of(64 * PAGE);
	struct iovec parts[] = { { memory, 100 }, { memory + 1000, 0 }, { memory + PAGE, PAGE } };
	memset(memory, 1, PAGE);
	memset(memory + PAGE, 2, PAGE);
	CHECK(one(context, IOCB_CMD_PWRITE, fd, memory, 1000, 500) == 1000);
	CHECK(one(context, IOCB_CMD_PWRITEV, fd, parts, 3, 5 * PAGE) == 100 + PAGE);
	CHECK(pread(fd, other, 1600, 0) == 1600);
	CHECK(is_all(other, 500, 0) && is_all(other + 500, 1000, 1) && is_all(other + 1500, 100, 0));
	CHECK(one(context, IOCB_CMD_PREAD, fd, other, 3 * PAGE, 5 * PAGE) == 3 * PAGE);
	CHECK(is_all(other, 100, 1) && is_all(other + 100, PAGE, 2) && is_all(other + PAGE + 100, 50, 6));
	memset(memory, 0, 2 * PAGE);
	CHECK(one(context, IOCB_CMD_PREADV, fd, parts, 3, 5 * PAGE) == 100 + PAGE);
	CHECK(is_all(memory, 100, 1) && is_all(memory + PAGE, PAGE, 2));
	CHECK(one(context, IOCB_CMD_FSYNC, fd, NULL, 0, 0) == 0);
	CHECK(one(context, IOCB_CMD_FDSYNC, fd, NULL, 0, 0) == 0);
	/* The whole file at once, and past its end. */
	char *all = memory_of((PAGES + 8) * PAGE);
	CHECK(one(context, IOCB_CMD_PREAD, fd, all, (PAGES + 8) * PAGE, 0) == PAGES * PAGE);
	for (int i = 8; i < PAGES; i++)
		CHECK(is_all(all + i * PAGE, PAGE, i));
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, PAGE, PAGES * PAGE) == 0);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, PAGE, PAGES * PAGE - 10) == 10);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, PAGE, 1L << 40) == 0);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, 0, 0) == 0);
	CHECK(one(context, IOCB_CMD_PWRITE, fd, memory, 0, 0) == 0);
	/* A read after a write sees the bytes that the write added to the file. */
	memset(memory, 7, PAGE);
	CHECK(one(context, IOCB_CMD_PWRITE, fd, memory, PAGE, (PAGES + 1) * PAGE) == PAGE);
	CHECK(one(context, IOCB_CMD_PREAD, fd, other, 3 * PAGE, PAGES * PAGE) == 2 * PAGE);
	CHECK(is_all(other, PAGE, 0) && is_all(other + PAGE, PAGE, 7));
	CHECK(lseek(fd, 0, SEEK_CUR) == 0);
	/* Durable, and with flags that only the kernel implements. */
	Block block;
	prepare(&block, IOCB_CMD_PWRITE, fd, memory, PAGE, 0);
	block.aio_rw_flags = RWF_DSYNC;
	CHECK(do_one(context, &block) == PAGE);
	prepare(&block, IOCB_CMD_PREAD, fd, other, PAGE, 0);
	block.aio_rw_flags = RWF_HIPRI;
	CHECK(do_one(context, &block) == PAGE && is_all(other, PAGE, 7));
	prepare(&block, IOCB_CMD_PWRITE, fd, memory, PAGE, 0);
	block.aio_rw_flags = RWF_APPEND;
	CHECK(do_one(context, &block) == PAGE);
	CHECK(lseek(fd, 0, SEEK_END) == (PAGES + 3) * PAGE);
	CHECK(close(fd) == 0);

	fd = open("log", O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0644);
	CHECK(fd >= 0);
	for (int i = 0; i < 20; i++) {
		memset(memory, i, 100);
		CHECK(one(context, IOCB_CMD_PWRITE, fd, memory, 100, 0) == 100);
	}
	CHECK(pread(fd, other, PAGE, 0) == 2000);
	for (int i = 0; i < 20; i++)
		CHECK(is_all(other + i * 100, 100, i));

	/* A request that only the kernel can serve, behind others that are not cached. */
	Event events[8];
	int cold = make(".", "b", 0, O_RDWR);
	for (int i = 0; i < 8; i++) {
		prepare(&blocks[i], IOCB_CMD_PREAD, cold, memory + i * PAGE, PAGE, i * 9 * PAGE);
		blocks[i].aio_rw_flags = i == 6 ? RWF_HIPRI : 0;
		pointers[i] = &blocks[i];
	}
	CHECK(submit(context, 8, pointers) == 8);
	CHECK(getevents(context, 8, 8, events, NULL) == 8);
	for (int i = 0; i < 8; i++)
		CHECK(events[i].res == PAGE && is_all(memory + i * PAGE, PAGE, i * 9));
	CHECK(destroy(context) == 0);
}

/* Requests and calls that are refused: the error, the point of refusal, and the requests before it. */
static void errors(void)
{
	int fd = make(".", "a", 0, O_RDWR), writer = make(".", "b", 0, O_WRONLY);
	int reader = make(".", "c", 0, O_RDONLY), foreign = make(aside, "d", 0, O_RDONLY);
	Context context = 0, none = 0, bogus = 0x1000;
	char *memory = memory_of(102 * PAGE);
	CHECK(mprotect(memory + PAGE, 101 * PAGE, PROT_NONE) == 0);
	char *hole = memory + PAGE;
	Event events[8];
	struct timespec now = { 0, 0 };
	CHECK(setup(0, &context) == -EINVAL);
	CHECK(setup(0x7fffffff, &context) < 0 && context == 0);
	CHECK(setup(8, (Context *)8) == -EFAULT);
	CHECK(setup(8, &context) == 0);
	CHECK(setup(8, &context) == -EINVAL);
	/* libaio reads the memory that the handle points to. */
	CHECK(lib_setup || getevents(bogus, 0, 1, events, &now) == -EINVAL);
	CHECK(submit(bogus, 0, pointers) == -EINVAL && submit(none, 0, pointers) == -EINVAL);
	CHECK(destroy(bogus) == -EINVAL && destroy(none) == -EINVAL);

	CHECK(one(context, IOCB_CMD_PREAD, 9999, memory, 10, 0) == -EBADF);
	CHECK(one(context, IOCB_CMD_PREAD, -1, memory, 10, 0) == -EBADF);
	CHECK(one(context, IOCB_CMD_PREAD, writer, memory, 10, 0) == -EBADF);
	CHECK(one(context, IOCB_CMD_PWRITE, reader, memory, 10, 0) == -EBADF);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, 10, -1) == -EINVAL);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, 10, INT64_MAX) == -EINVAL);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, SIZE_MAX, 0) == -EINVAL);
	CHECK(one(context, 77, fd, memory, 10, 0) == -EINVAL);
	CHECK(one(context, IOCB_CMD_PREADV, fd, (void *)16, 2, 0) == -EFAULT);
	struct iovec many[1025] = { { memory, 1 } };
	CHECK(one(context, IOCB_CMD_PREADV, fd, many, 1025, 0) == -EINVAL);
	/* Unmapped memory: for cold and cached reads, and for a write. */
	for (int i = 0; i < 2; i++) {
		CHECK(one(context, IOCB_CMD_PREAD, fd, hole, PAGE, 4 * PAGE) == -EFAULT);
		CHECK(one(context, IOCB_CMD_PREAD, fd, hole, 100 * PAGE, 0) == -EFAULT);
		CHECK(one(context, IOCB_CMD_PREAD, fd, memory, PAGE, 4 * PAGE) == PAGE);
	}
	CHECK(one(context, IOCB_CMD_PWRITE, fd, hole, PAGE, 4 * PAGE) == -EFAULT);
	CHECK(one(context, IOCB_CMD_PREAD, fd, memory, PAGE, 4 * PAGE) == PAGE);
	CHECK(is_all(memory, PAGE, 4));

	CHECK(submit(context, -1, pointers) == -EINVAL && submit(context, 0, pointers) == 0);
	CHECK(submit(context, 1, (Block **)16) == -EFAULT);
	Block *nowhere[] = { (Block *)16 };
	CHECK(submit(context, 1, nowhere) == -EFAULT);
	/* The requests before a bad one are submitted. */
	int fds[] = { fd, foreign, reader, fd, 9999, fd };
	for (int i = 0; i < 6; i++) {
		prepare(&blocks[i], IOCB_CMD_PREAD, fds[i], memory, 10, i * PAGE);
		pointers[i] = &blocks[i];
	}
	for (int first = 0; first < 4; first++) {
		CHECK(submit(context, 6 - first, pointers + first) == 4 - first);
		CHECK(getevents(context, 4 - first, 8, events, NULL) == 4 - first);
	}
	CHECK(submit(context, 2, pointers + 4) == -EBADF);
	CHECK(getevents(context, 0, 8, events, &now) == 0);

	/* The kernel may cancel requests of some files, and not of others: the completion arrives in any case. */
	CHECK(submit(context, 1, pointers) == 1);
	int cancelled = cancel(context, &blocks[0], events);
	CHECK(cancelled == -EINVAL || cancelled == -EAGAIN || cancelled == -EINPROGRESS);
	CHECK(getevents(context, 1, 8, events, NULL) == 1);
	CHECK(cancel(context, &blocks[0], events) == -EINVAL);
	CHECK(destroy(context) == 0);
	CHECK(destroy(context) == -EINVAL);
}

/* A program that never takes its completions can't submit without limit. */
static void capacity(void)
{
	int fds[] = { make(".", "a", 0, O_RDONLY), make(aside, "b", 0, O_RDONLY) };
	char *memory = memory_of(PAGE);
	Event event;
	for (int kind = 0; kind < 3; kind++) {
		Context context = context_for(4);
		int taken = 0;
		for (;; taken++) {
			CHECK(taken < 4096);
			int fd = fds[kind == 2 ? taken % 2 : kind];
			prepare(&blocks[taken], IOCB_CMD_PREAD, fd, memory, 1, taken % PAGES * PAGE);
			Block *block = &blocks[taken];
			int submitted = submit(context, 1, &block);
			if (submitted == -EAGAIN)
				break;
			CHECK(submitted == 1);
		}
		CHECK(taken >= 4);
		for (int round = 0; round < taken; round++) {
			CHECK(getevents(context, 1, 1, &event, NULL) == 1 && event.res == 1);
			Block *block = (Block *)(uintptr_t)event.obj;
			if (round % 2) {
				CHECK(submit(context, 1, &block) == 1);
				CHECK(getevents(context, 1, 1, &event, NULL) == 1 && event.res == 1);
			}
		}
		struct timespec now = { 0, 0 };
		CHECK(getevents(context, 0, 1, &event, &now) == 0);
		CHECK(destroy(context) == 0);
	}
}

/* Destroying a context waits for the requests in flight; a request keeps its file when the descriptor is closed. */
static void in_flight(void)
{
	char *other = memory_of(MANY * PAGE);
	for (int round = 0; round < 20; round++) {
		int fd = make(".", "a", round, O_RDWR);
		char *memory = memory_of(MANY * PAGE);
		Event events[MANY];
		Context context = context_for(MANY);
		for (int i = 0; i < MANY; i++) {
			int opcode = i % 4 ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
			if (i % 4 == 0)
				memset(memory + i * PAGE, 200, PAGE);
			prepare(&blocks[i], opcode, fd, memory + i * PAGE, PAGE, (long)i * PAGE);
			pointers[i] = &blocks[i];
		}
		CHECK(submit(context, MANY, pointers) == MANY);
		if (round % 2) {
			CHECK(destroy(context) == 0);
			/* No request reads into the memory any more. */
			CHECK(munmap(memory, MANY * PAGE) == 0);
			CHECK(close(fd) == 0);
		} else {
			CHECK(close(fd) == 0);
			int another = make(".", "b", 77, O_RDWR);
			CHECK(getevents(context, MANY, MANY, events, NULL) == MANY);
			for (int e = 0; e < MANY; e++) {
				CHECK(events[e].res == PAGE);
				long i = (Block *)(uintptr_t)events[e].obj - blocks;
				CHECK(is_all(memory + i * PAGE, PAGE, i % 4 ? round + i : 200));
			}
			CHECK(pread(another, other, PAGE, 0) == PAGE && is_all(other, PAGE, 77));
			CHECK(close(another) == 0 && destroy(context) == 0);
			CHECK(munmap(memory, MANY * PAGE) == 0);
		}
		fd = open("a", O_RDONLY);
		CHECK(fd >= 0 && pread(fd, other, MANY * PAGE, 0) == MANY * PAGE);
		for (int i = 0; i < MANY; i++)
			CHECK(is_all(other + i * PAGE, PAGE, i % 4 ? round + i : 200));
		CHECK(close(fd) == 0);
	}
}

/* File "a", made outside the served directory, and then open for reading: the library has seen no write to it. */
static int never_written(int first)
{
	char path[4096];
	CHECK(close(make(aside, "a", first, O_RDONLY)) == 0);
	snprintf(path, sizeof path, "%s/a", aside);
	CHECK(rename(path, "a") == 0);
	int fd = open("a", O_RDONLY);
	CHECK(fd >= 0);
	return fd;
}

/* Completions are taken late: after other writers have overwritten or cut the bytes that were read, or closed the
   file. */
static void taken_late(void)
{
	char *memory = memory_of((MANY + 1) * PAGE), *ones = memory_of(MANY * PAGE);
	memset(ones, 200, MANY * PAGE);
	for (int round = 0; round < 24; round++) {
		int fd = never_written(round);
		int writes = round & 1, cuts = round & 2, closes = round & 4;
		/* Aligned as devices require it, and unaligned. */
		char *to = memory + (round & 8 ? 16 : 0);
		Event events[MANY];
		Context context = context_for(MANY);
		for (int i = 0; i < MANY; i++) {
			prepare(&blocks[i], IOCB_CMD_PREAD, fd, to + i * PAGE, PAGE, (long)i * PAGE);
			pointers[i] = &blocks[i];
		}
		CHECK(submit(context, MANY, pointers) == MANY);
		/* From now on the kernel may serve the file. */
		int writer = open("a", O_RDWR);
		CHECK(writer >= 0);
		/* The write covers the second quarter and the third; it may be torn. */
		if (writes)
			CHECK(pwrite(writer, ones, MANY / 2 * PAGE, MANY / 4 * PAGE) == MANY / 2 * PAGE);
		if (cuts)
			CHECK(ftruncate(writer, MANY * 7 / 8 * PAGE + 100) == 0);
		if (closes)
			CHECK(close(fd) == 0);
		if (round % 3 == 0) {
			CHECK(destroy(context) == 0);
		} else {
			CHECK(getevents(context, MANY, MANY, events, NULL) == MANY);
			for (int e = 0; e < MANY; e++) {
				long i = (Block *)(uintptr_t)events[e].obj - blocks, got = events[e].res;
				int written = writes && i >= MANY / 4 && i < MANY * 3 / 4;
				if (!cuts || i < MANY * 7 / 8)
					CHECK(got == PAGE);
				CHECK(got == PAGE || (i == MANY * 7 / 8 && got == 100) || (i > MANY * 7 / 8 && got == 0));
				CHECK(is_all(to + i * PAGE, got, round + i) || (written && is_all(to + i * PAGE, got, 200)));
			}
			CHECK(destroy(context) == 0);
		}
		if (!closes)
			CHECK(close(fd) == 0);
		fd = open("a", O_RDONLY);
		long size = cuts ? MANY * 7 / 8 * PAGE + 100 : PAGES * PAGE;
		CHECK(fd >= 0 && lseek(fd, 0, SEEK_END) == size);
		for (int i = 0; i < MANY * 3 / 4; i++) {
			int written = writes && i >= MANY / 4;
			CHECK(pread(fd, memory, PAGE, i * PAGE) == PAGE && is_all(memory, PAGE, written ? 200 : round + i));
		}
		CHECK(close(fd) == 0 && close(writer) == 0);
	}
}

/* A write after all reads have ended, and before their completions are taken: an eventfd counts the ends, none
   before its read has ended. The kernel's reads have the old bytes. A read that the library hands to the kernel has
   the new bytes if the library finds that a write overtook it. */
static void overtaken(void)
{
	char *memory = memory_of((MANY + 1) * PAGE), *ones = memory_of(MANY * PAGE);
	memset(ones, 200, MANY * PAGE);
	int is_strict = getenv("AIO_IS_STRICT") != NULL;
	for (int round = 0; round < 8; round++) {
		int fd = never_written(round), told = eventfd(0, 0);
		CHECK(told >= 0);
		char *to = memory + (round & 1 ? 16 : 0);
		Event events[MANY];
		Context context = context_for(MANY);
		for (int i = 0; i < MANY; i++) {
			prepare(&blocks[i], IOCB_CMD_PREAD, fd, to + i * PAGE, PAGE, (long)i * PAGE);
			blocks[i].aio_flags = IOCB_FLAG_RESFD;
			blocks[i].aio_resfd = told;
			/* Not in order: bytes that are read ahead would be hits, with the old bytes. */
			pointers[i] = &blocks[i * 37 % MANY];
		}
		CHECK(submit(context, MANY, pointers) == MANY);
		for (uint64_t all = 0, some; all < MANY; all += some)
			CHECK(read(told, &some, sizeof some) == sizeof some);
		int writer = open("a", O_RDWR);
		CHECK(writer >= 0);
		CHECK(pwrite(writer, ones, MANY / 2 * PAGE, MANY / 4 * PAGE) == MANY / 2 * PAGE);
		if (round & 2)
			CHECK(ftruncate(writer, MANY * 7 / 8 * PAGE + 100) == 0);
		CHECK(getevents(context, MANY, MANY, events, NULL) == MANY);
		int anew = 0;
		for (int e = 0; e < MANY; e++) {
			long i = (Block *)(uintptr_t)events[e].obj - blocks, got = events[e].res;
			int written = i >= MANY / 4 && i < MANY * 3 / 4;
			CHECK(got <= PAGE && (is_all(to + i * PAGE, got, round + i) ||
					      (written && is_all(to + i * PAGE, got, 200))));
			anew += written && got == PAGE && to[i * PAGE] == (char)200;
		}
		/* Some pages entered the cache, and their reads were hits. In later rounds most reads are hits,
		   as pages that are missed again enter the cache. */
		CHECK(!is_strict || round > 0 || anew > 0);
		CHECK(destroy(context) == 0 && close(fd) == 0 && close(writer) == 0 && close(told) == 0);
	}
}

static Context shared_context;
static int shared_fds[3];
enum { EACH = 1000, SUBMITTERS = 4 };

static void *submitter(void *number)
{
	static Block all[SUBMITTERS][EACH];
	Block *mine = all[(intptr_t)number];
	char *memory = memory_of(PAGE);
	for (int i = 0; i < EACH; i++) {
		Block *block = &mine[i];
		int page = (i * 37 + (intptr_t)number) % PAGES;
		prepare(block, IOCB_CMD_PREAD, shared_fds[i % 3], memory, 100, (long)page * PAGE);
		int submitted;
		while ((submitted = submit(shared_context, 1, &block)) == -EAGAIN)
			sched_yield();
		CHECK(submitted == 1);
	}
	return NULL;
}

static int shared_left;

static void *taker(void *min)
{
	Event events[16];
	int got = 0, taken;
	struct timespec moment = { 0, 10000000 };
	while (__atomic_load_n(&shared_left, __ATOMIC_SEQ_CST) > 0) {
		taken = getevents(shared_context, (intptr_t)min, 16, events, &moment);
		CHECK(taken >= 0);
		for (int e = 0; e < taken; e++)
			CHECK(events[e].res == 100);
		__atomic_fetch_sub(&shared_left, taken, __ATOMIC_SEQ_CST);
	}
	return NULL;
}

/* Threads submit while others wait, for one completion and for several; no completion is lost or doubled. */
static void threads(void)
{
	shared_fds[0] = make(".", "a", 0, O_RDONLY);
	shared_fds[1] = make(aside, "b", 0, O_RDONLY);
	shared_fds[2] = make(".", "c", 0, O_RDWR);
	pthread_t all[SUBMITTERS + 2];
	Event event;
	struct timespec now = { 0, 0 };

	shared_context = context_for(MANY);
	shared_left = SUBMITTERS * EACH;
	for (intptr_t i = 0; i < SUBMITTERS + 2; i++)
		CHECK(pthread_create(&all[i], NULL, i < SUBMITTERS ? submitter : taker,
		                     (void *)(i < SUBMITTERS ? i : (i - SUBMITTERS) * 7 + 1)) == 0);
	for (int i = 0; i < SUBMITTERS + 2; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	CHECK(shared_left == 0 && getevents(shared_context, 0, 1, &event, &now) == 0);
	CHECK(destroy(shared_context) == 0);

	/* The main thread waits for all completions. */
	shared_context = context_for(SUBMITTERS * EACH);
	for (intptr_t i = 0; i < SUBMITTERS; i++)
		CHECK(pthread_create(&all[i], NULL, submitter, (void *)i) == 0);
	Event *events = malloc(SUBMITTERS * EACH * sizeof *events);
	CHECK(getevents(shared_context, SUBMITTERS * EACH, SUBMITTERS * EACH, events, NULL) ==
	      SUBMITTERS * EACH);
	for (int i = 0; i < SUBMITTERS; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	CHECK(destroy(shared_context) == 0);
}

static int waiter_id;

static void *waiter(void *context)
{
	Event events[8];
	__atomic_store_n(&waiter_id, gettid(), __ATOMIC_SEQ_CST);
	int got = getevents((Context)context, 8, 8, events, NULL);
	CHECK(got == -EINVAL || (got >= 0 && got < 8));
	return NULL;
}

/* Waits until the waiter is in the kernel. If it came later, the context's handle could belong to another context. */
static void wait_for_waiter(void)
{
	char path[64], line[64];
	int id, number = 0;
	while ((id = __atomic_load_n(&waiter_id, __ATOMIC_SEQ_CST)) == 0)
		sched_yield();
	snprintf(path, sizeof path, "/proc/self/task/%d/syscall", id);
	while (number != SYS_io_getevents) {
		FILE *file = fopen(path, "r");
		CHECK(file && fgets(line, sizeof line, file) && fclose(file) == 0);
		number = atoi(line);
	}
}

static void *churner(void *number)
{
	char *memory = memory_of(8 * PAGE);
	Event events[8];
	Block mine[8], *all[8];
	/* Few rounds: the kernel needs many milliseconds to destroy a context. */
	for (int round = 0; round < 25; round++) {
		Context context = context_for(8);
		for (int i = 0; i < 8; i++) {
			int page = (round * 11 + i * 31 + (intptr_t)number) % PAGES;
			prepare(&mine[i], IOCB_CMD_PREAD, shared_fds[i % 3], memory + i * PAGE, PAGE,
			        (long)page * PAGE);
			all[i] = &mine[i];
		}
		CHECK(submit(context, 8, all) == 8);
		if (round % 2)
			CHECK(getevents(context, 8, 8, events, NULL) == 8);
		CHECK(destroy(context) == 0);
	}
	return NULL;
}

/* Many threads create and destroy contexts; one context is destroyed while another thread waits in it. */
static void churn(void)
{
	shared_fds[0] = make(".", "a", 0, O_RDONLY);
	shared_fds[1] = make(aside, "b", 100, O_RDONLY);
	shared_fds[2] = make(".", "c", 0, O_RDWR);
	pthread_t all[4];
	for (intptr_t i = 0; i < 4; i++)
		CHECK(pthread_create(&all[i], NULL, churner, (void *)i) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(all[i], NULL) == 0);
	char *memory = memory_of(PAGE);
	for (int round = 0; round < 10; round++) {
		Context context = context_for(8);
		waiter_id = 0;
		CHECK(pthread_create(&all[0], NULL, waiter, (void *)context) == 0);
		wait_for_waiter();
		/* Fewer requests than the waiter waits for. */
		prepare(&blocks[0], IOCB_CMD_PREAD, shared_fds[round % 3], memory, 1, round * PAGE);
		pointers[0] = &blocks[0];
		CHECK(submit(context, 1, pointers) == 1);
		CHECK(destroy(context) == 0);
		CHECK(pthread_join(all[0], NULL) == 0);
	}
}

static int submitted_late;

/* Submits until the context is destroyed. */
static void *late_submitter(void *context)
{
	char *memory = memory_of(PAGE);
	Event events[8];
	struct timespec now = { 0, 0 };
	Block block, *pointer = &block;
	for (;;) {
		prepare(&block, IOCB_CMD_PREAD, shared_fds[0], memory, PAGE, 0);
		int submitted = submit((Context)context, 1, &pointer);
		if (submitted == -EINVAL)
			return NULL;
		CHECK(submitted == 1 || submitted == -EAGAIN);
		__atomic_fetch_add(&submitted_late, 1, __ATOMIC_SEQ_CST);
		/* Not by libaio's function, which reads memory of the kernel's context, destroyed or not. */
		int got = told(syscall(SYS_io_getevents, context, 0, 8, events, &now));
		CHECK(got >= 0 || got == -EINVAL);
	}
}

/* A context is destroyed while threads submit to it. */
static void closing(void)
{
	shared_fds[0] = make(".", "a", 0, O_RDONLY);
	pthread_t all[4];
	for (int round = 0; round < 50; round++) {
		Context context = context_for(8);
		submitted_late = 0;
		for (int i = 0; i < 4; i++)
			CHECK(pthread_create(&all[i], NULL, late_submitter, (void *)context) == 0);
		while (__atomic_load_n(&submitted_late, __ATOMIC_SEQ_CST) < 20)
			sched_yield();
		CHECK(destroy(context) == 0);
		for (int i = 0; i < 4; i++)
			CHECK(pthread_join(all[i], NULL) == 0);
	}
}

/* A child has no contexts; the parent's contexts continue. */
static void forks(void)
{
	for (int round = 0; round < 5; round++) {
		int fd = make(".", "a", 0, O_RDWR);
		char *memory = memory_of(MANY * PAGE);
		Event events[MANY];
		Context context = context_for(MANY);
		for (int i = 0; i < MANY; i++) {
			int opcode = i % 8 ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
			if (i % 8 == 0)
				memset(memory + i * PAGE, i, PAGE);
			prepare(&blocks[i], opcode, fd, memory + i * PAGE, PAGE, (long)i * PAGE);
			pointers[i] = &blocks[i];
		}
		CHECK(submit(context, MANY, pointers) == MANY);
		pid_t child = fork();
		CHECK(child >= 0);
		if (child == 0) {
			struct timespec moment = { 0, 1000000 };
			CHECK(getevents(context, 1, 1, events, &moment) == -EINVAL);
			CHECK(submit(context, 1, pointers) == -EINVAL && destroy(context) == -EINVAL);
			Context own = context_for(8);
			int fd = make(".", "b", 50, O_RDWR);
			CHECK(one(own, IOCB_CMD_PREAD, fd, memory, PAGE, 3 * PAGE) == PAGE);
			CHECK(is_all(memory, PAGE, 53));
			/* Submitted, and no thread waits for it. */
			memset(memory, 99, PAGE);
			prepare(&blocks[0], IOCB_CMD_PWRITE, fd, memory, PAGE, 0);
			CHECK(submit(own, 1, pointers) == 1);
			if (round % 2)
				_exit(0);
			exit(0);
		}
		CHECK(getevents(context, MANY, MANY, events, NULL) == MANY);
		for (int i = 0; i < MANY; i++)
			CHECK(events[i].res == PAGE && is_all(memory + i * PAGE, PAGE, i));
		int status;
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		CHECK(destroy(context) == 0 && close(fd) == 0);
		fd = open("b", O_RDONLY);
		CHECK(fd >= 0 && pread(fd, memory, PAGE, 0) == PAGE && is_all(memory, PAGE, 99));
		CHECK(close(fd) == 0);
	}
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = {
		{ "mixed", mixed },       { "eventfds", eventfds }, { "waits", waits },
		{ "operations", operations }, { "errors", errors }, { "capacity", capacity },
		{ "in_flight", in_flight }, { "threads", threads }, { "forks", forks },
		{ "churn", churn },           { "closing", closing }, { "taken_late", taken_late },
		{ "overtaken", overtaken },
	};
	CHECK(argc == 4);
	if (strcmp(argv[1], "libaio") == 0)
		use_libaio();
	aside = argv[3];
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (strcmp(argv[2], all[i].name) == 0) {
			all[i].run();
			return 0;
		}
	return 2;
}
