/* The fate of the process's POSIX locks. Prints the locks that another process finds; the output must be the same
 * with the library and without it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

/* An inline system call, which no hook sees. */
static long raw(long number, long a, long b, long c)
{
	long result;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return result;
}

static struct flock whole(int type)
{
	return (struct flock){.l_type = type, .l_whence = SEEK_SET};
}

static int lock(int fd, int type)
{
	struct flock l = whole(type);
	return fcntl(fd, F_SETLK, &l);
}

/* ---- an observer, a process that was forked before any file was open ---- */

static int ask[2], answer[2];

static void observe(void)
{
	CHECK(pipe(ask) == 0 && pipe(answer) == 0);
	if (fork() != 0) {
		close(ask[0]);
		close(answer[1]);
		return;
	}
	close(ask[1]);
	char name;
	while (read(ask[0], &name, 1) == 1) {
		char path[2] = {name, 0};
		struct flock l = whole(F_WRLCK);
		/* Without the hooks, and read-only: the file is served to the observed process. */
		int fd = raw(SYS_openat, AT_FDCWD, (long)path, O_RDONLY);
		CHECK(fd >= 0 && raw(SYS_fcntl, fd, F_GETLK, (long)&l) == 0);
		char state = l.l_type == F_UNLCK ? '-' : l.l_type == F_WRLCK ? 'W' : 'R';
		raw(SYS_close, fd, 0, 0);
		write(answer[1], &state, 1);
	}
	_exit(0);
}

/* The lock on a file with a name of one letter, as other processes find it. */
static char seen(char name)
{
	char state;
	CHECK(write(ask[1], &name, 1) == 1 && read(answer[0], &state, 1) == 1);
	return state;
}

/* ---- threads whose hits defer the close of other descriptions ---- */

static char page[128 << 10];
static int hot;

static void *hit(void *unused)
{
	static __thread char buffer[sizeof page];
	for (;;)
		pread(hot, buffer, sizeof buffer, 0);
}

static void heat(int threads)
{
	int fd = open("hot", O_RDWR | O_CREAT, 0644);
	write(fd, page, sizeof page);
	close(fd);
	hot = open("hot", O_RDONLY);
	for (int i = 0; i < threads; i++) {
		pthread_t thread;
		pthread_create(&thread, NULL, hit, NULL);
	}
	usleep(100000);
}

static void touch(const char *name)
{
	close(open(name, O_RDWR | O_CREAT, 0644));
}

/* The number of descriptors that are open on a file of this name, after a while. */
static int left_open(const char *name)
{
	int count;
	for (int tries = 0; tries < 500; tries++) {
		char link[64], target[512];
		DIR *dir = opendir("/proc/self/fd");
		count = 0;
		for (struct dirent *e; (e = readdir(dir));) {
			snprintf(link, sizeof link, "/proc/self/fd/%s", e->d_name);
			ssize_t n = readlink(link, target, sizeof target - 1);
			target[n < 0 ? 0 : n] = 0;
			count += n > 0 && !strcmp(strrchr(target, '/') ? strrchr(target, '/') + 1 : "", name);
		}
		closedir(dir);
		if (count == 0)
			break;
		/* Each call into the library makes it close the descriptions that it deferred. */
		touch("poke");
		usleep(1000);
	}
	return count;
}

/* A file is closed, opened again and locked, while other threads hit, and any other file is opened. */
static void reopened(int flags, int type, int unseen)
{
	int lost = 0;
	/* A close waits for the readers: milliseconds if the readers occupy every processor. */
	for (int i = 0; i < 50; i++) {
		int first = open("d", flags);
		int second = unseen ? raw(SYS_openat, AT_FDCWD, (long)"d", flags) : open("d", flags);
		CHECK(first >= 0 && second >= 0);
		pread(first, page, 10, 0);
		close(first);
		struct flock l = whole(type);
		CHECK((unseen ? raw(SYS_fcntl, second, F_SETLK, (long)&l) : fcntl(second, F_SETLK, &l)) == 0);
		touch("j");
		lost += seen('d') == '-';
		if (unseen)
			raw(SYS_close, second, 0, 0);
		else
			close(second);
		CHECK(seen('d') == '-');
	}
	printf("lost %d\n", lost);
}

static void deferred(void)
{
	observe();
	touch("d");
	heat(2);
	reopened(O_RDWR, F_WRLCK, 0);
	reopened(O_RDONLY, F_RDLCK, 0);
	/* With `second` open past the hooks, `first` is served. */
	reopened(O_RDONLY, F_RDLCK, 1);
	printf("left %d\n", left_open("d"));
}

/* Every way to take a lock, and every way to close another descriptor of the file. */
static void ways(void)
{
	observe();
	touch("d");
	heat(1);
	static const char *takes[] = {"fcntl", "fcntl64", "syscall", "lockf", "inline", "flock", "ofd"};
	static const char *ends[] = {"nothing", "other", "close", "dup", "dup2", "dup3", "close_range", "closefrom",
		"syscall", "fclose", "freopen", "inline"};
	for (int t = 0; t < sizeof takes / sizeof *takes; t++)
		for (int e = 0; e < sizeof ends / sizeof *ends; e++)
			for (int served = 0; served < 2; served++) {
				/* Served, or, if open for writing twice, not served. */
				int flags = served ? O_RDONLY : O_RDWR, type = served ? F_RDLCK : F_WRLCK;
				int fd = open("d", flags), other = open("d", flags), high = dup2(other, 90), nothing;
				FILE *stream = fopen("d", served ? "r" : "r+");
				struct flock l = whole(type);
				pread(fd, page, 10, 0);
				errno = 0;
				switch (t) {
				case 0: fcntl(fd, F_SETLK, &l); break;
				case 1: fcntl64(fd, F_SETLKW, &l); break;
				case 2: syscall(SYS_fcntl, fd, F_SETLK, &l); break;
				case 3: lockf(fd, F_LOCK, 0); break;
				case 4: raw(SYS_fcntl, fd, F_SETLK, (long)&l); break;
				case 5: flock(fd, LOCK_EX); break;
				case 6: fcntl(fd, F_OFD_SETLK, &l); break;
				}
				char before = seen('d');
				switch (e) {
				case 0: break;
				case 1: touch("j"); break;
				case 2: close(other); other = -1; break;
				case 3: close(dup(fd)); break;
				case 4: nothing = open("j", O_RDONLY); dup2(nothing, high); close(nothing); break;
				case 5: nothing = open("j", O_RDONLY); dup3(nothing, high, O_CLOEXEC); close(nothing); break;
				case 6: close_range(high, high, 0); high = -1; break;
				case 7: closefrom(high); high = -1; break;
				case 8: syscall(SYS_close, other); other = -1; break;
				case 9: fclose(stream); stream = NULL; break;
				case 10: stream = freopen("j", "r", stream); break;
				case 11: raw(SYS_close, other, 0, 0); other = -1; break;
				}
				char after = seen('d');
				touch("j");
				printf("%s %s %d: %c %c %c", takes[t], ends[e], served, before, after, seen('d'));
				if (stream)
					fclose(stream);
				close(other);
				close(high);
				close(fd);
				printf(" %c\n", seen('d'));
			}
	printf("left %d\n", left_open("d"));
}

/* ---- exec ---- */

static char *self;

/* Holds its inherited descriptors and locks for as long as its input is open. */
static void hold(void)
{
	char byte;
	write(1, "h", 1);
	read(0, &byte, 1);
	_exit(0);
}

enum {
	PLAIN, CLOEXEC, ONE_OF_TWO, BOTH, SET_LATER, CLEARED_LATER, FAILED_FIRST, FAILED_THEN_SET, CLOSED_BEFORE, UNSEEN,
	LOCKF, OFD, FLOCK, READ_ONLY, VARIADIC, BY_NUMBER, UNLOCKED, EXECS
};

static void become_holder(int how)
{
	int flags = how == READ_ONLY ? O_RDONLY : O_RDWR;
	char *args[] = {self, "hold", NULL};
	int fd = open("d", flags | (how == CLOEXEC || how == CLEARED_LATER ? O_CLOEXEC : 0)), two = -1;
	pread(fd, page, 10, 0);
	if (how == ONE_OF_TWO || how == BOTH)
		two = open("d", O_RDWR | (how == ONE_OF_TWO ? O_CLOEXEC : 0));
	if (how == CLOSED_BEFORE)
		close(open("d", O_RDWR));
	struct flock l = whole(how == READ_ONLY ? F_RDLCK : F_WRLCK);
	switch (how) {
	case UNSEEN: CHECK(raw(SYS_fcntl, fd, F_SETLK, (long)&l) == 0); break;
	case LOCKF: CHECK(lockf(fd, F_LOCK, 0) == 0); break;
	case OFD: CHECK(fcntl(fd, F_OFD_SETLK, &l) == 0); break;
	case FLOCK: CHECK(flock(fd, LOCK_EX) == 0); break;
	case UNLOCKED: break;
	default: CHECK(fcntl(fd, F_SETLK, &l) == 0);
	}
	if (how == SET_LATER || how == CLEARED_LATER)
		fcntl(fd, F_SETFD, how == SET_LATER ? FD_CLOEXEC : 0);
	if (how == FAILED_FIRST || how == FAILED_THEN_SET)
		CHECK(execv("/none", args) == -1);
	if (how == FAILED_THEN_SET)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
	if (how == VARIADIC)
		execl(self, self, "hold", NULL);
	if (how == BY_NUMBER)
		syscall(SYS_execve, self, args, environ);
	execv(self, args);
	_exit(1);
}

static void exec(void)
{
	touch("d");
	for (int how = 0; how < EXECS; how++)
		for (int threads = 0; threads < 2; threads++) {
			int in[2], out[2], status;
			CHECK(pipe(in) == 0 && pipe(out) == 0);
			pid_t pid = fork();
			if (pid == 0) {
				if (threads)
					heat(1);
				dup2(in[0], 0);
				dup2(out[1], 1);
				closefrom(threads ? 20 : 3);
				for (int fd = 3; fd < 20; fd++)
					if (fd != hot)
						close(fd);
				become_holder(how);
			}
			close(in[0]);
			close(out[1]);
			char byte;
			CHECK(read(out[0], &byte, 1) == 1);
			int fd = open("d", O_RDWR);
			struct flock l = whole(F_WRLCK);
			CHECK(fcntl(fd, F_GETLK, &l) == 0);
			printf("exec %d, threads %d: lock %d flock %d\n", how, threads, l.l_type, flock(fd, LOCK_EX | LOCK_NB));
			close(fd);
			close(in[1]);
			CHECK(waitpid(pid, &status, 0) == pid && status == 0);
			/* The locks end with the process. */
			fd = open("d", O_RDWR);
			CHECK(lock(fd, F_WRLCK) == 0 && flock(fd, LOCK_EX | LOCK_NB) == 0);
			close(fd);
			close(out[0]);
		}
}

/* A lock from before an exec, on a descriptor whose open the library has not seen. */
static void inherited(void)
{
	observe();
	heat(1);
	/* Number 9, from `inherit`. */
	for (int i = 0; i < 100; i++) {
		CHECK(seen('d') == 'R');
		struct stat st;
		CHECK(stat("d", &st) == 0 && fstat(9, &st) == 0);
		touch("j");
	}
	printf("still %c\n", seen('d'));
	/* The program's own close of another descriptor ends the lock. */
	close(open("d", O_RDONLY));
	printf("closed %c\n", seen('d'));
	CHECK(lock(9, F_RDLCK) == 0);
	touch("j");
	printf("again %c\n", seen('d'));
	/* A file for which the kernel can't grant a lease, because of a writer: this must not end the lock. */
	int writer = raw(SYS_openat, AT_FDCWD, (long)"d", O_RDWR), fd = open("d", O_RDONLY);
	printf("opened %c\n", seen('d'));
	close(fd);
	raw(SYS_close, writer, 0, 0);
	printf("closed %c\n", seen('d'));
}

static void inherit(void)
{
	touch("d");
	int fd = raw(SYS_openat, AT_FDCWD, (long)"d", O_RDONLY);
	CHECK(raw(SYS_dup2, fd, 9, 0) == 9);
	raw(SYS_close, fd, 0, 0);
	struct flock l = whole(F_RDLCK);
	CHECK(raw(SYS_fcntl, 9, F_SETLK, (long)&l) == 0);
	char *args[] = {self, "inherited", NULL};
	execv(self, args);
	_exit(1);
}

int main(int count, char **args)
{
	self = args[0];
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(args[1], "deferred")) deferred();
	else if (!strcmp(args[1], "ways")) ways();
	else if (!strcmp(args[1], "exec")) exec();
	else if (!strcmp(args[1], "hold")) hold();
	else if (!strcmp(args[1], "inherit")) inherit();
	else if (!strcmp(args[1], "inherited")) inherited();
	else return 2;
	fflush(stdout);
	_exit(0);
}
