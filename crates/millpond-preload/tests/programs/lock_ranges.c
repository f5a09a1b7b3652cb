/* Locks whose range is relative to the offset or to the end, and the results of F_GETLK. Prints the ranges that another
   process finds. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "check.h"

enum { LEN = 20000 };

static int asks[2], answers[2];
static char bytes[LEN];

/* Another process, forked before the file is open: it reports the bytes that it finds locked. */
static void answer(void)
{
	int kind;
	CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && close(asks[1]) == 0);
	while (read(asks[0], &kind, sizeof kind) == sizeof kind) {
		char text[200] = "";
		int fd = open("locked", O_RDWR);
		CHECK(fd >= 0);
		off_t at = 0;
		for (int i = 0; i < 3; i++) {
			struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = at};
			CHECK(fcntl(fd, F_GETLK, &lock) == 0);
			if (lock.l_type == F_UNLCK)
				break;
			snprintf(text + strlen(text), 60, " %s %ld+%ld", lock.l_type == F_RDLCK ? "read" : "write",
				 (long)lock.l_start, (long)lock.l_len);
			if (lock.l_len == 0)
				break;
			at = lock.l_start + lock.l_len;
		}
		CHECK(close(fd) == 0);
		CHECK(write(answers[1], text, sizeof text) == sizeof text);
	}
	_exit(0);
}

static void show(const char *what, int result)
{
	int kind = 0, told = errno;
	char text[200];
	CHECK(write(asks[1], &kind, sizeof kind) == sizeof kind);
	CHECK(read(answers[0], text, sizeof text) == sizeof text);
	printf("%s: %s;%s\n", what, result ? strerror(told) : "ok", text);
}

static void try_all(const char *name, int (*prepare)(void))
{
	static const struct { int whence; off_t start, len; } ranges[] = {
		{SEEK_SET, 5, 10}, {SEEK_END, -100, 100}, {SEEK_END, -100, 0}, {SEEK_END, 0, 50}, {SEEK_END, -10, -20},
		{SEEK_CUR, 0, 10}, {SEEK_CUR, -7, 3}, {SEEK_CUR, 0, -5}, {SEEK_END, -1000000, 5}, {77, 0, 1},
	};
	static const int commands[] = {F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW};
	char what[100];
	for (unsigned i = 0; i < sizeof ranges / sizeof *ranges; i++)
		for (unsigned j = 0; j < 4; j++) {
			int fd = prepare();
			struct flock lock = {F_WRLCK, ranges[i].whence, ranges[i].start, ranges[i].len};
			int result = fcntl(fd, commands[j], &lock);
			snprintf(what, sizeof what, "%s, %d by %d", name, commands[j], i);
			show(what, result);
			CHECK(close(fd) == 0);
		}
	for (int i = 0; i < 4; i++) {
		static const int modes[] = {F_LOCK, F_TLOCK, F_TEST, F_ULOCK};
		int fd = prepare();
		int result = lockf(fd, modes[i], i % 2 ? 30 : -30);
		snprintf(what, sizeof what, "%s, lockf %d", name, modes[i]);
		show(what, result);
		CHECK(close(fd) == 0);
	}
	/* F_GETLK's view of another process's lock. */
	for (unsigned i = 0; i < sizeof ranges / sizeof *ranges; i++)
		for (int command = F_GETLK;; command = F_OFD_GETLK) {
			int fd = prepare();
			struct flock lock = {F_WRLCK, ranges[i].whence, ranges[i].start, ranges[i].len};
			int result = fcntl(fd, command, &lock);
			printf("%s, %d by %d: %s; %d %d %ld %ld\n", name, command, i, result ? strerror(errno) : "ok", lock.l_type,
			       lock.l_whence, (long)lock.l_start, (long)lock.l_len);
			CHECK(close(fd) == 0);
			if (command == F_OFD_GETLK)
				break;
		}
}

/* Written, but not read. */
static int prepare_written(void)
{
	int fd = open("locked", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0 && write(fd, bytes, LEN) == LEN && lseek(fd, 9000, SEEK_SET) == 9000);
	return fd;
}

/* Used often, and then extended. */
static int prepare_used(void)
{
	int fd = open("locked", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	CHECK(fd >= 0 && write(fd, bytes, LEN / 2) == LEN / 2);
	for (int i = 0; i < 400; i++)
		CHECK(pread(fd, bytes, 100, i % 8 * 100) == 100);
	CHECK(pwrite(fd, bytes, LEN / 2, LEN / 2) == LEN / 2 && lseek(fd, 9000, SEEK_SET) == 9000);
	return fd;
}

int main(void)
{
	CHECK(pipe2(asks, O_CLOEXEC) == 0 && pipe2(answers, O_CLOEXEC) == 0);
	pid_t other = fork();
	CHECK(other >= 0);
	if (other == 0)
		answer();
	try_all("written", prepare_written);
	try_all("used", prepare_used);
	fflush(stdout);
	int status;
	CHECK(close(asks[1]) == 0 && waitpid(other, &status, 0) == other && status == 0);
	return 0;
}
