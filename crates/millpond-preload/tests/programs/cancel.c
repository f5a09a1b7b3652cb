/* Threads that are cancelled, or end, during their I/O. One scenario each, by name. `points` prints its events,
   which the test compares; the others print nothing and return 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "check.h"

enum { SIZE = 4 * PAGE };
#define IS(name) (strcmp(op, name) == 0)

static const char *op;
static int fd, other, ends[2];
static FILE *stream;

/* A file of SIZE bytes, cached. */
static int make(const char *path)
{
	char page[PAGE];
	int made = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(made >= 0);
	for (int i = 0; i < SIZE / PAGE; i++) {
		memset(page, 'a' + i, PAGE);
		CHECK(write(made, page, PAGE) == PAGE);
	}
	CHECK(lseek(made, 0, SEEK_SET) == 0);
	for (int i = 0; i < SIZE / PAGE; i++)
		CHECK(pread(made, page, PAGE, i * PAGE) == PAGE && is_all(page, PAGE, 'a' + i));
	return made;
}

static void check_usable(int made)
{
	char page[PAGE];
	memset(page, 'z', PAGE);
	CHECK(pwrite(made, page, PAGE, PAGE) == PAGE);
	memset(page, 0, PAGE);
	CHECK(pread(made, page, PAGE, PAGE) == PAGE && is_all(page, PAGE, 'z'));
	CHECK(lseek(made, 0, SEEK_END) >= 2 * PAGE && fsync(made) == 0);
}

/* Closes the file and opens it again, as its only descriptor: a descriptor or lock left on it would show in the
   report. */
static void check_let_go(int made, const char *path)
{
	check_usable(made);
	CHECK(close(made) == 0);
	made = open(path, O_RDWR);
	CHECK(made >= 0);
	check_usable(made);
	CHECK(close(made) == 0);
}

static void *ended(pthread_t thread)
{
	void *result;
	CHECK(pthread_join(thread, &result) == 0);
	return result;
}

/* ---- calls with a cancel request pending: which of them act on it, and their effects before that ---- */

static void *ask_then_call(void *unused)
{
	static char some[PAGE], more[2];
	struct iovec vector = {some, 512};
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	off_t zero = 0;
	for (int i = 0; i < 3; i++)
		CHECK(pread(fd, some, 512, 0) == 512);
	memset(some, '#', sizeof some);
	pthread_cancel(pthread_self());
	/* None of these is a cancellation point. */
	CHECK(lseek(fd, 3, SEEK_SET) == 3 && lseek(fd, 0, SEEK_SET) == 0);
	struct stat status;
	CHECK(fstat(fd, &status) == 0 && status.st_size == SIZE);
	CHECK(syscall(SYS_pread64, fd, more, 1, 0) == 1 && syscall(SYS_pwrite64, fd, more, 1, 0) == 1);
	CHECK(ftruncate(fd, SIZE) == 0 && flock(fd, LOCK_EX) == 0);
	CHECK(dup2(fd, 200) == 200 && syscall(SYS_close, 200) == 0);

	if (IS("read")) read(fd, some, 512);
	if (IS("read_pipe")) read(ends[0], some, 1);
	if (IS("pread")) pread(fd, some, 512, 0);
	if (IS("readv")) readv(fd, &vector, 1);
	if (IS("preadv")) preadv(fd, &vector, 1, 0);
	if (IS("preadv2")) preadv2(fd, &vector, 1, 0, 0);
	if (IS("write")) write(fd, some, 512);
	if (IS("write_pipe")) write(ends[1], some, 1);
	if (IS("pwrite")) pwrite(fd, some, 512, 0);
	if (IS("writev")) writev(fd, &vector, 1);
	if (IS("pwritev")) pwritev(fd, &vector, 1, 0);
	if (IS("pwritev2")) pwritev2(fd, &vector, 1, 0, 0);
	if (IS("pwritev2_dsync")) pwritev2(fd, &vector, 1, 0, RWF_DSYNC);
	if (IS("fsync")) fsync(fd);
	if (IS("fdatasync")) fdatasync(fd);
	if (IS("syncfs")) syncfs(fd);
	if (IS("sync")) sync();
	if (IS("msync")) msync(NULL, 0, MS_SYNC);
	if (IS("sync_file_range")) sync_file_range(fd, 0, 0, 7);
	if (IS("open")) open("made", O_RDWR | O_CREAT | O_EXCL, 0644);
	if (IS("open_itself")) open(op, O_RDWR);
	if (IS("openat")) openat(AT_FDCWD, "made", O_RDWR | O_CREAT | O_EXCL, 0644);
	if (IS("creat")) creat("made", 0644);
	if (IS("close")) close(fd);
	if (IS("close_pipe")) close(ends[0]);
	if (IS("close_range")) close_range(fd, fd, 0);
	if (IS("dup")) close(dup(fd));
	if (IS("setlkw")) fcntl(fd, F_SETLKW, &lock);
	if (IS("ofd_setlkw")) fcntl(fd, F_OFD_SETLKW, &lock);
	if (IS("setlk")) fcntl(fd, F_SETLK, &lock);
	if (IS("getfl")) fcntl(fd, F_SETFL, fcntl(fd, F_GETFL));
	if (IS("lockf")) lockf(fd, F_LOCK, 0);
	if (IS("tlockf")) lockf(fd, F_TLOCK, 0);
	if (IS("posix_fallocate")) posix_fallocate(fd, 0, 2 * SIZE);
	if (IS("fallocate")) fallocate(fd, 0, 0, 2 * SIZE);
	if (IS("fallocate_zero")) fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, PAGE);
	if (IS("truncate")) truncate(op, SIZE / 2);
	if (IS("copy_file_range")) copy_file_range(fd, NULL, other, NULL, PAGE, 0);
	if (IS("copy_in_kernel")) copy_file_range(fd, NULL, fd, &zero, 0, 0);
	if (IS("sendfile")) sendfile(other, fd, NULL, PAGE);
	if (IS("sendfile_pipe")) sendfile(ends[1], fd, NULL, 512);
	if (IS("splice")) splice(fd, NULL, ends[1], NULL, 512, 0);
	if (IS("splice_back")) splice(fd, &zero, ends[1], NULL, 512, 0);
	if (IS("fopen")) fopen("made", "w");
	if (IS("fread")) fread(more, 1, 1, stream);
	if (IS("fread_again")) fread(more, 1, 2, stream), fread(more, 1, 1, stream);
	if (IS("fwrite")) fwrite(some, 1, PAGE, stream), fwrite(some, 1, PAGE, stream);
	if (IS("fflush")) fputs("x", stream), fflush(stream);
	if (IS("fflush_clean")) fflush(stream);
	if (IS("fseek")) fseek(stream, 0, SEEK_SET);
	if (IS("fclose")) fclose(stream);
	if (IS("fclose_clean")) fclose(stream);
	if (IS("mkstemp")) { char name[] = "tempXXXXXX"; mkstemp(name); }
	/* The command is long: libc kills the shell when it acts on the request, but not before it has started the
	   shell. */
	if (IS("system")) system("exec sleep 1000");
	if (IS("pclose")) pclose(popen("true", "r"));
	if (IS("sleep")) usleep(1);
	if (IS("rename")) rename(op, op);
	return NULL;
}

static void points(void)
{
	static const char *const all[] = {
		"read", "read_pipe", "pread", "readv", "preadv", "preadv2", "write", "write_pipe", "pwrite",
		"writev", "pwritev", "pwritev2", "pwritev2_dsync", "fsync", "fdatasync", "syncfs", "sync",
		"msync", "sync_file_range", "open", "open_itself", "openat", "creat", "close", "close_pipe",
		"close_range", "dup", "setlkw", "ofd_setlkw", "setlk", "getfl", "lockf", "tlockf",
		"posix_fallocate", "fallocate", "fallocate_zero", "truncate", "copy_file_range",
		"copy_in_kernel", "sendfile", "sendfile_pipe", "splice", "splice_back", "fopen", "fread",
		"fread_again", "fwrite", "fflush", "fflush_clean", "fseek", "fclose", "fclose_clean", "system",
		"mkstemp", "pclose", "sleep", "rename", "none",
	};
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
		op = all[i];
		fd = make(op);
		char name[100];
		snprintf(name, sizeof name, "%s.other", op);
		other = make(name);
		CHECK(pipe(ends) == 0 && write(ends[1], "pq", 2) == 2);
		snprintf(name, sizeof name, "%s.stream", op);
		stream = fopen(name, "w+");
		if (strstr(op, "clean") == NULL)
			CHECK(fputs("hi", stream) >= 0);
		if (IS("fread_again"))
			fflush(stream), rewind(stream), fputs("hi", stream), rewind(stream);

		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, ask_then_call, NULL) == 0);
		int cancelled = ended(thread) == PTHREAD_CANCELED;
		int queued = -1;
		ioctl(ends[1], 0x541b /* FIONREAD */, &queued);
		printf("%s: %s, pipe %d", op, cancelled ? "cancelled" : "done", queued);
		static char bytes[3 * SIZE];
		int is_open = fcntl(fd, F_GETFD) >= 0;
		printf(", at %d", is_open ? (int)lseek(fd, 0, SEEK_CUR) : -1);
		unsigned sum = 0;
		ssize_t n = is_open ? pread(fd, bytes, sizeof bytes, 0) : -1;
		for (ssize_t j = 0; j < n; j++)
			sum = sum * 31 + bytes[j];
		printf(", %zd bytes %x", n, sum);
		printf(", other at %d", (int)lseek(other, 0, SEEK_CUR));
		struct stat status;
		CHECK(stat(name, &status) == 0);
		printf(", stream %d", (int)status.st_size);
		printf(", made %d, pipe %s\n", unlink("made") == 0, fcntl(ends[0], F_GETFD) < 0 ? "closed" : "open");
		if (is_open && !IS("truncate"))
			check_usable(fd);
		if (is_open)
			CHECK(close(fd) == 0);
		check_let_go(other, (snprintf(name, sizeof name, "%s.other", op), name));
		close(ends[0]);
		close(ends[1]);
	}
}

/* ---- waits in the kernel ---- */

static volatile int is_waiting;

static void *wait_in_kernel(void *unused)
{
	char some[512];
	struct iovec vector = {some, 512};
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	CHECK(pread(fd, some, 512, 0) == 512);
	is_waiting = 1;
	if (IS("read")) read(ends[0], some, 1);
	if (IS("readv")) readv(ends[0], &vector, 1);
	if (IS("write")) for (;;) write(ends[1], some, 512);
	if (IS("writev")) for (;;) writev(ends[1], &vector, 1);
	if (IS("open")) open("fifo", O_RDONLY);
	if (IS("setlkw")) fcntl(fd, F_SETLKW, &lock);
	if (IS("ofd_setlkw")) fcntl(fd, F_OFD_SETLKW, &lock);
	if (IS("lockf")) lockf(fd, F_LOCK, 0);
	if (IS("splice_out")) for (off_t at = 0;; at = 0) CHECK(splice(fd, &at, ends[1], NULL, SIZE, 0) > 0);
	if (IS("splice_in")) splice(ends[0], NULL, other, NULL, SIZE, 0);
	if (IS("fread")) fread(some, 1, 1, stream);
	if (IS("system")) system("exec sleep 1000");
	if (IS("recv")) recv(other, some, 1, 0);
	if (IS("sendmsg")) for (;;) { struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1}; sendmsg(other, &message, 0); }
	if (IS("poll")) poll(NULL, 0, -1);
	return NULL;
}

/* A pause that is too short would test less, but no test would fail. */
static void let_it_wait(void)
{
	while (!is_waiting)
		usleep(1000);
	usleep(60 * 1000);
}

static void waits(void)
{
	static const char *const all[] = {
		"read", "readv", "write", "writev", "open", "setlkw", "ofd_setlkw", "lockf", "splice_out",
		"splice_in", "fread", "system", "recv", "sendmsg", "poll",
	};
	CHECK(mkfifo("fifo", 0644) == 0 || errno == EEXIST);
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
		int pair[2], locked[2];
		char byte;
		op = all[i];
		CHECK(pipe(ends) == 0 && pipe(locked) == 0);
		pid_t child = 0;
		if (strstr(op, "lk") || IS("lockf")) {
			close(make(op));
			child = fork();
			CHECK(child >= 0);
			if (child == 0) {
				struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
				int mine = open(op, O_RDWR);
				CHECK(fcntl(mine, IS("ofd_setlkw") ? F_OFD_SETLK : F_SETLK, &lock) == 0);
				write(locked[1], "x", 1);
				for (;;)
					pause();
			}
			CHECK(read(locked[0], &byte, 1) == 1);
			fd = open(op, O_RDWR);
		} else {
			fd = make(op);
		}
		other = open("sink", O_RDWR | O_CREAT | O_TRUNC, 0644);
		CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
		if (IS("recv") || IS("sendmsg")) {
			close(other);
			other = pair[0];
		}
		stream = fdopen(ends[0], "r");
		is_waiting = 0;
		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, wait_in_kernel, NULL) == 0);
		let_it_wait();
		CHECK(pthread_cancel(thread) == 0);
		CHECK(ended(thread) == PTHREAD_CANCELED);
		if (child) {
			kill(child, SIGKILL);
			CHECK(waitpid(child, NULL, 0) == child);
		}
		check_let_go(fd, op);
		close(other);
		close(pair[0]);
		close(pair[1]);
		close(locked[0]);
		close(locked[1]);
		close(ends[0]);
		close(ends[1]);
	}
}

/* ---- loops that are cancelled at any point ---- */

static int type;
static pthread_key_t key;
static volatile int turns, cleaned, destroyed;

static void *loop(void *unused)
{
	char page[PAGE];
	int old;
	sigset_t all;
	FILE *mine = NULL;
	memset(page, 'q', PAGE);
	if (IS("fread")) {
		mine = fopen("streamed", "r");
		CHECK(mine != NULL);
	}
	if (IS("blocked")) {
		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, NULL);
	}
	CHECK(pthread_setcanceltype(type, &old) == 0 && old == PTHREAD_CANCEL_DEFERRED);
	CHECK(pthread_setcanceltype(type, &old) == 0 && old == type);
	for (unsigned i = 0;; i++) {
		off_t at = i * 7919u % (SIZE / PAGE) * PAGE;
		if (IS("hits")) CHECK(pread(fd, page, PAGE, at) == PAGE);
		if (IS("reads")) lseek(fd, 0, SEEK_SET), read(fd, page, 512);
		if (IS("writes")) CHECK(pwrite(fd, page, PAGE, at) == PAGE);
		if (IS("both")) pread(fd, page, PAGE, at), pwrite(fd, page, PAGE, at);
		if (IS("syncs")) pwrite(fd, page, PAGE, at), fsync(fd);
		if (IS("vectors")) {
			struct iovec vector[2] = {{page, 100}, {page + 100, 1000}};
			CHECK(preadv(fd, vector, 2, at) == 1100 && pwritev(fd, vector, 2, at) == 1100);
		}
		if (IS("copies")) {
			off_t in = 0, out = 0;
			CHECK(copy_file_range(fd, &in, other, &out, SIZE, 0) == SIZE);
		}
		if (IS("allocates")) fallocate(fd, FALLOC_FL_ZERO_RANGE, 0, PAGE);
		if (IS("fread")) rewind(mine), fread(page, 1, PAGE, mine);
		/* These calls are no cancellation points; so a request must end them while the type is asynchronous. */
		if (IS("seeks")) lseek(fd, at, SEEK_SET), lseek(fd, 0, SEEK_END);
		if (IS("stats")) { struct stat status; CHECK(fstat(fd, &status) == 0); }
		if (IS("blocked") && i % 1000 == 0) lseek(fd, at, SEEK_SET);
		turns = 1;
		/* Sleeps indefinitely, in a system call by number. */
		if (IS("asleep")) syscall(SYS_ppoll, NULL, 0, NULL, NULL, 8);
	}
	return NULL;
}

static void cancel_loops(const char *const *all, int rounds)
{
	for (; *all; all++) {
		op = *all;
		fd = make(op);
		other = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0644);
		close(make("streamed"));
		for (int round = 0; round < rounds; round++) {
			pthread_t thread;
			turns = 0;
			CHECK(pthread_create(&thread, NULL, loop, NULL) == 0);
			while (!turns)
				usleep(100);
			usleep(round * 137 % 1500);
			CHECK(pthread_cancel(thread) == 0);
			CHECK(ended(thread) == PTHREAD_CANCELED);
		}
		check_let_go(other, "copy");
		check_let_go(fd, op);
	}
}

static void deferred(void)
{
	static const char *const all[] = {"hits", "reads", "writes", "both", "syncs", "vectors", "copies",
		"allocates", "fread", NULL};
	type = PTHREAD_CANCEL_DEFERRED;
	cancel_loops(all, 25);
}

static void asynchronous(void)
{
	static const char *const all[] = {"nothing", "hits", "reads", "writes", "both", "syncs", "vectors",
		"copies", "allocates", "seeks", "stats", "blocked", "asleep", NULL};
	type = PTHREAD_CANCEL_ASYNCHRONOUS;
	cancel_loops(all, 25);
}

/* ---- a request stays pending while cancellation is disabled ---- */

static void *hold_off(void *unused)
{
	char page[PAGE];
	int old;
	CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old) == 0 && old == PTHREAD_CANCEL_ENABLE);
	if (type == PTHREAD_CANCEL_ASYNCHRONOUS)
		CHECK(pthread_setcanceltype(type, NULL) == 0);
	turns = 1;
	while (turns == 1)
		CHECK(pread(fd, page, PAGE, 0) == PAGE);
	for (int i = 0; i < 1000; i++)
		CHECK(pread(fd, page, PAGE, 0) == PAGE && pwrite(fd, page, PAGE, 0) == PAGE);
	CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old) == 0 && old == PTHREAD_CANCEL_DISABLE);
	turns = 3;
	CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &old) == 0 && old == PTHREAD_CANCEL_DISABLE);
	if (type == PTHREAD_CANCEL_ASYNCHRONOUS)
		for (;;)
			;
	pread(fd, page, PAGE, 0);
	CHECK(0);
	return NULL;
}

static void *ask_itself(void *unused)
{
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
	pthread_cancel(pthread_self());
	CHECK(0);
	return NULL;
}

static void *ask_first(void *unused)
{
	pthread_cancel(pthread_self());
	pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
	CHECK(0);
	return NULL;
}

static void held_off(void)
{
	fd = make("held");
	pthread_t thread;
	for (int round = 0; round < 10; round++) {
		type = round % 2 ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED;
		turns = 0;
		CHECK(pthread_create(&thread, NULL, hold_off, NULL) == 0);
		while (turns != 1)
			usleep(100);
		CHECK(pthread_cancel(thread) == 0);
		turns = 2;
		CHECK(ended(thread) == PTHREAD_CANCELED && turns == 3);
		CHECK(pthread_create(&thread, NULL, round % 4 < 2 ? ask_itself : ask_first, NULL) == 0);
		CHECK(ended(thread) == PTHREAD_CANCELED);
	}
	check_let_go(fd, "held");
}

/* ---- I/O of a thread after its cancellation ---- */

static void use_file(void)
{
	char page[PAGE];
	check_usable(fd);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 'a'));
	int mine = open("cleaned", O_RDWR | O_CREAT | O_APPEND, 0644);
	CHECK(mine >= 0 && write(mine, "x", 1) == 1 && close(mine) == 0);
	FILE *file = fopen("cleaned", "a");
	CHECK(file && fputs("y", file) >= 0 && fclose(file) == 0);
}

static void clean(void *unused)
{
	use_file();
	cleaned++;
}

static void destroy(void *rounds)
{
	use_file();
	destroyed++;
	/* Runs again, when the library's own destructor may have run. */
	if ((intptr_t)rounds > 1)
		pthread_setspecific(key, (void *)((intptr_t)rounds - 1));
}

static void *with_cleanup(void *unused)
{
	char page[PAGE];
	pthread_setspecific(key, (void *)3);
	pthread_cleanup_push(clean, NULL);
	pthread_cleanup_push(clean, NULL);
	turns = 1;
	if (IS("hits"))
		for (;;)
			pread(fd, page, PAGE, 0);
	if (IS("wait"))
		read(ends[0], page, 1);
	if (IS("spin")) {
		pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
		for (;;)
			;
	}
	if (IS("exit"))
		pthread_exit(PTHREAD_CANCELED);
	pthread_cleanup_pop(0);
	pthread_cleanup_pop(0);
	return NULL;
}

static void cleanup(void)
{
	static const char *const all[] = {"hits", "wait", "spin", "exit"};
	unlink("cleaned");
	CHECK(pthread_key_create(&key, destroy) == 0 && pipe(ends) == 0);
	fd = make("shared");
	for (int round = 0; round < 20; round++) {
		op = all[round % 4];
		turns = 0;
		pthread_t thread;
		CHECK(pthread_create(&thread, NULL, with_cleanup, NULL) == 0);
		while (!turns)
			usleep(100);
		usleep(round * 100);
		pthread_cancel(thread);
		CHECK(ended(thread) == PTHREAD_CANCELED);
		CHECK(cleaned == 2 * (round + 1) && destroyed == 3 * (round + 1));
	}
	int done = open("cleaned", O_RDONLY);
	CHECK(lseek(done, 0, SEEK_END) == 20 * (2 + 3) * 2);
	close(done);
	check_let_go(fd, "shared");
}

/* ---- threads that end in a handler, or where libc calls them back ---- */

static void end_thread(int signal)
{
	pthread_exit((void *)(intptr_t)signal);
}

static ssize_t end_in_read(void *cookie, char *to, size_t size) { pthread_exit((void *)1); }
static ssize_t end_in_write(void *cookie, const char *from, size_t size) { pthread_exit((void *)2); }
static int end_in_close(void *cookie) { pthread_exit((void *)3); }

static void *call_back(void *kind)
{
	cookie_io_functions_t functions = {.read = end_in_read, .write = end_in_write, .close = end_in_close};
	char page[PAGE];
	FILE *mine = fopencookie(NULL, kind == (void *)1 ? "r" : "w", functions);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && mine != NULL);
	if (kind == (void *)1)
		fread(page, 1, 1, mine);
	if (kind == (void *)2)
		fputs("x", mine), fclose(mine);
	fclose(mine);
	return NULL;
}

static void *end_by_fault(void *unused)
{
	char page[PAGE];
	CHECK(pread(fd, page, PAGE, 0) == PAGE);
	*(volatile char *)0 = 1;
	return NULL;
}

static void ends_of_threads(void)
{
	static const char *const all[] = {"hits", "reads", "writes", "both", "syncs", "vectors", "seeks", "stats", "copies"};
	struct sigaction action = {.sa_handler = end_thread};
	pthread_t thread;
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	type = PTHREAD_CANCEL_DEFERRED;
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
		op = all[i];
		fd = make(op);
		other = open("copy", O_RDWR | O_CREAT | O_TRUNC, 0644);
		for (int round = 0; round < 40; round++) {
			turns = 0;
			CHECK(pthread_create(&thread, NULL, loop, NULL) == 0);
			while (!turns)
				usleep(100);
			usleep(round * 137 % 1500);
			CHECK(pthread_kill(thread, SIGUSR1) == 0);
			CHECK(ended(thread) == (void *)SIGUSR1);
		}
		check_let_go(other, "copy");
		check_let_go(fd, op);
	}
	fd = make("last");
	for (intptr_t kind = 1; kind <= 3; kind++) {
		CHECK(pthread_create(&thread, NULL, call_back, (void *)kind) == 0);
		CHECK(ended(thread) == (void *)kind);
	}
	CHECK(pthread_create(&thread, NULL, end_by_fault, NULL) == 0);
	CHECK(ended(thread) == (void *)SIGSEGV);
	op = "read";
	CHECK(pipe(ends) == 0);
	is_waiting = 0;
	CHECK(pthread_create(&thread, NULL, wait_in_kernel, NULL) == 0);
	let_it_wait();
	CHECK(pthread_kill(thread, SIGUSR1) == 0 && ended(thread) == (void *)SIGUSR1);
	check_let_go(fd, "last");
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = {
		{"points", points}, {"waits", waits}, {"deferred", deferred}, {"asynchronous", asynchronous},
		{"held_off", held_off}, {"cleanup", cleanup}, {"ends_of_threads", ends_of_threads},
	};
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
		if (count > 1 && strcmp(arguments[1], all[i].name) == 0) {
			all[i].run();
			return 0;
		}
	return 2;
}
