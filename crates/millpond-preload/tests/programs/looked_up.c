/* I/O that bypasses the hooks, on a cached file: functions looked up in libc's own handle, a library that binds to
 * libc first, rings. `args[1]` selects one. Prints nothing if all results are the kernel's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <libaio.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

static char page[PAGE], found[PAGE];

/* Cached, and in mode back not yet in the file. */
static int cached(const char *path)
{
	make_pages(path, 'a');
	int fd = open(path, O_RDWR);
	for (int i = 0; i < 3; i++)
		CHECK(pread(fd, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'a'));
	memset(page, 'b', PAGE);
	CHECK(pwrite(fd, page, PAGE, 0) == PAGE);
	memset(page, 'c', PAGE);
	return fd;
}

/* ---- dlsym ---- */

typedef ssize_t transfer(int, void *, size_t, off_t);

static void check_transfers(transfer *read_at, transfer *write_at)
{
	CHECK(read_at && write_at);
	int fd = cached("f");
	CHECK(read_at(fd, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'b'));
	CHECK(write_at(fd, page, PAGE, 0) == PAGE);
	CHECK(pread(fd, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'c'));
	CHECK(close(fd) == 0);
	fd = open("f", O_RDONLY);
	CHECK(read(fd, found, PAGE) == PAGE && is_all(found, PAGE, 'c'));
	close(fd);
}

static void lookups(const char *libraries)
{
	void *libc = dlopen("libc.so.6", RTLD_NOW), *all = dlopen(NULL, RTLD_NOW), *libm = dlopen("libm.so.6", RTLD_NOW);
	CHECK(libc && all && libm);
	check_transfers(dlsym(libc, "pread"), dlsym(libc, "pwrite64"));
	check_transfers(dlvsym(libc, "pread64", "GLIBC_2.2.5"), dlvsym(libc, "pwrite", "GLIBC_2.2.5"));
	check_transfers(dlsym(all, "pread"), dlsym(all, "pwrite"));
	/* libm's own dependency. */
	check_transfers(dlsym(libm, "pread"), dlsym(libm, "pwrite"));
	check_transfers(dlsym(RTLD_DEFAULT, "pread"), dlsym(RTLD_DEFAULT, "pwrite"));
	check_transfers(dlsym(RTLD_NEXT, "pread"), dlsym(RTLD_NEXT, "pwrite"));
	/* A lookup function that was itself looked up. */
	void *(*look_up)(void *, const char *) = dlsym(libc, "dlsym");
	check_transfers(look_up(libc, "pread"), look_up(libc, "pwrite"));
	int (*close_it)(int) = dlsym(libc, "close");
	int fd = cached("f");
	CHECK(close_it(fd) == 0);
	int pipes[2];
	CHECK(pipe(pipes) == 0 && pipes[0] == fd && write(pipes[1], "pipe", 4) == 4 && read(fd, found, 10) == 4);
	close(pipes[0]), close(pipes[1]);
	/* Missing symbols, and symbols that the library does not replace, have libc's results. */
	dlerror();
	CHECK(dlsym(libc, "no_such_function") == NULL && dlerror() != NULL && dlerror() == NULL);
	CHECK(dlvsym(libc, "pread", "NONE_1") == NULL && dlerror() != NULL);
	CHECK(dlsym(libc, "qsort") != NULL && dlerror() == NULL);
	CHECK(dlsym(libc, "io_setup") == NULL && dlerror() != NULL);
	double (*root)(double) = dlsym(libm, "sqrt");
	CHECK(root && root(9) == 3);
	CHECK(dlopen("no_such_library.so", RTLD_NOW) == NULL && dlerror() != NULL);
	/* A library's handle has the library's own definition, and the next definition after it is libc's, not the
	   hook. */
	char path[512];
	snprintf(path, sizeof path, "%s/libown.so", libraries);
	void *own = dlopen(path, RTLD_NOW);
	CHECK(own);
	int *counted = dlsym(own, "own_calls");
	transfer *own_pread = dlsym(own, "pread");
	CHECK(counted && own_pread && own_pread != dlsym(libc, "pread"));
	check_transfers(own_pread, dlsym(libc, "pwrite"));
	CHECK(*counted == 1);
}

/* `libown.so` is preloaded after the library under test: the library calls its function, which looks up libc's. */
static void between(void)
{
	int *calls = dlsym(RTLD_DEFAULT, "own_calls"), fd = cached("f"), again = open("f", O_RDWR | O_SYNC), before = *calls;
	CHECK(pread(again, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'b'));
	CHECK(pread64(fd, found, PAGE, PAGE) == PAGE && is_all(found, PAGE, 'b'));
	CHECK(*calls == before + 2);
}

/* libaio's functions make their system calls themselves. */
static io_context_t context;
static int (*submit)(io_context_t, long, struct iocb **);
static int (*get)(io_context_t, long, long, struct io_event *, struct timespec *);

static ssize_t by_aio(int operation, int fd, void *memory, size_t bytes, off_t offset)
{
	struct iocb block = {.aio_lio_opcode = operation, .aio_fildes = fd}, *blocks = &block;
	block.u.c.buf = memory, block.u.c.nbytes = bytes, block.u.c.offset = offset;
	struct io_event event;
	CHECK(submit(context, 1, &blocks) == 1 && get(context, 1, 1, &event, NULL) == 1);
	return event.res;
}

static ssize_t aio_read_at(int fd, void *memory, size_t bytes, off_t offset) { return by_aio(IO_CMD_PREAD, fd, memory, bytes, offset); }
static ssize_t aio_write_at(int fd, void *memory, size_t bytes, off_t offset) { return by_aio(IO_CMD_PWRITE, fd, memory, bytes, offset); }

static void libaio(void)
{
	void *library = dlopen("libaio.so.1", RTLD_NOW);
	CHECK(library);
	int (*setup)(int, io_context_t *) = dlsym(library, "io_setup");
	submit = dlsym(library, "io_submit"), get = dlsym(library, "io_getevents");
	CHECK(setup && submit && get && setup(8, &context) == 0);
	check_transfers(aio_read_at, aio_write_at);
}

/* ---- libraries that find libc's functions before ours ---- */

static void bound(const char *libraries, int how)
{
	char path[512];
	snprintf(path, sizeof path, "%s/libbound.so", libraries);
	int before = cached("before");
	void *library = how == 2 ? dlmopen(LM_ID_NEWLM, path, RTLD_NOW) : dlopen(path, RTLD_NOW | (how ? RTLD_DEEPBIND : 0));
	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	CHECK(library);
	check_transfers(dlsym(library, "bound_read"), dlsym(library, "bound_write"));
	transfer *read_at = dlsym(library, "bound_read"), *write_at = dlsym(library, "bound_write");
	CHECK(read_at(before, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'b'));
	CHECK(write_at(before, page, PAGE, 0) == PAGE);
	CHECK(pread(before, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'c'));
}

/* ---- io_uring, by system calls alone ---- */

static struct io_uring_params params;
static uint32_t *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;
static int ring;

/* By functions of a library like liburing, which makes its system calls itself. */
static int (*library_setup)(unsigned, struct io_uring_params *);
static int (*library_enter)(int, unsigned, unsigned, unsigned);

static void set_up(void)
{
	ring = library_setup ? library_setup(8, &params) : syscall(SYS_io_uring_setup, 8, &params);
	if (ring < 0) {
		fprintf(stderr, "no io_uring here: %s\n", strerror(errno));
		_exit(77);
	}
	int all = PROT_READ | PROT_WRITE;
	char *sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, all, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
	char *cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof *cqes, all, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_CQ_RING);
	sqes = mmap(NULL, params.sq_entries * sizeof *sqes, all, MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
	CHECK(sq != MAP_FAILED && cq != MAP_FAILED && sqes != MAP_FAILED);
	sq_tail = (uint32_t *)(sq + params.sq_off.tail), sq_mask = (uint32_t *)(sq + params.sq_off.ring_mask);
	sq_array = (uint32_t *)(sq + params.sq_off.array);
	cq_head = (uint32_t *)(cq + params.cq_off.head), cq_tail = (uint32_t *)(cq + params.cq_off.tail);
	cq_mask = (uint32_t *)(cq + params.cq_off.ring_mask), cqes = (struct io_uring_cqe *)(cq + params.cq_off.cqes);
}

static int by_ring(int operation, int fd, void *memory, unsigned bytes, uint64_t offset)
{
	uint32_t slot = *sq_tail & *sq_mask;
	sqes[slot] = (struct io_uring_sqe){.opcode = operation, .fd = fd, .addr = (uintptr_t)memory, .len = bytes, .off = offset};
	sq_array[slot] = slot;
	__atomic_store_n(sq_tail, *sq_tail + 1, __ATOMIC_RELEASE);
	CHECK((library_enter ? library_enter(ring, 1, 1, IORING_ENTER_GETEVENTS)
		: syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0)) == 1);
	CHECK(__atomic_load_n(cq_tail, __ATOMIC_ACQUIRE) != *cq_head);
	int result = cqes[*cq_head & *cq_mask].res;
	__atomic_store_n(cq_head, *cq_head + 1, __ATOMIC_RELEASE);
	return result;
}

static ssize_t ring_read(int fd, void *memory, size_t bytes, off_t offset) { return by_ring(IORING_OP_READ, fd, memory, bytes, offset); }
static ssize_t ring_write(int fd, void *memory, size_t bytes, off_t offset) { return by_ring(IORING_OP_WRITE, fd, memory, bytes, offset); }

static void rings(void)
{
	int before = cached("before");
	CHECK(lseek(before, PAGE, SEEK_SET) == PAGE);
	set_up();
	CHECK(ring_read(before, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'b'));
	CHECK(ring_read(before, found, PAGE, -1) == PAGE && is_all(found, PAGE, 'a' + 1));
	CHECK(ring_write(before, page, PAGE, 0) == PAGE);
	CHECK(pread(before, found, PAGE, 0) == PAGE && is_all(found, PAGE, 'c'));
	check_transfers(ring_read, ring_write);
	/* Also in a child that inherits the ring. */
	int status;
	if (fork() == 0) {
		check_transfers(ring_read, ring_write);
		_exit(0);
	}
	CHECK(wait(&status) > 0 && status == 0);
	/* A descriptor that a ring has closed. */
	int fd = cached("f"), pipes[2];
	CHECK(by_ring(IORING_OP_CLOSE, fd, NULL, 0, 0) == 0);
	CHECK(pipe(pipes) == 0 && pipes[0] == fd && write(pipes[1], "pipe", 4) == 4 && read(fd, found, 10) == 4);
}

int main(int count, char **args)
{
	if (!strcmp(args[1], "lookups")) lookups(args[2]);
	else if (!strcmp(args[1], "libaio")) libaio();
	else if (!strcmp(args[1], "between")) between();
	else if (!strcmp(args[1], "bound")) bound(args[2], 0);
	else if (!strcmp(args[1], "deep")) bound(args[2], 1);
	else if (!strcmp(args[1], "space")) bound(args[2], 2);
	else if (!strcmp(args[1], "rings")) rings();
	else if (!strcmp(args[1], "library")) {
		library_setup = dlsym(RTLD_DEFAULT, "io_uring_setup");
		library_enter = dlsym(RTLD_DEFAULT, "own_enter");
		CHECK(library_setup && library_enter);
		rings();
	}
	else return 2;
	return 0;
}
