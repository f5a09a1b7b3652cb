/* Files that are open across a fork, which one side closes, or leaves by exec or death. One scenario each, by name.
   Prints nothing and returns 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "check.h"

enum { BEFORE = 1000, AFTER = 8000 };

extern char **environ;

/* Page i is all `first + i`. */
static void read_pages(int fd, int times, int first)
{
	char page[PAGE];
	for (int i = 0; i < times; i++) {
		int wanted = i * 7 % 32;
		CHECK(pread(fd, page, PAGE, (off_t)wanted * PAGE) == PAGE && is_all(page, PAGE, first + wanted));
	}
}

static int make(int flags)
{
	make_pages("f", 0);
	int fd = open("f", flags);
	CHECK(fd >= 0);
	read_pages(fd, BEFORE, 0);
	return fd;
}

static void end(pid_t child)
{
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* ---- messages between processes: a byte lets the other process continue ---- */

struct line {
	int to_child[2], to_parent[2];
};

static struct line make_line(void)
{
	struct line line;
	CHECK(pipe2(line.to_child, O_CLOEXEC) == 0 && pipe2(line.to_parent, O_CLOEXEC) == 0);
	return line;
}

static void say(int *ends)
{
	CHECK(write(ends[1], "x", 1) == 1);
}

static void hear(int *ends)
{
	char byte;
	CHECK(read(ends[0], &byte, 1) == 1);
}

/* ---- a child that executes another program, which does not inherit the file ---- */

static void execs(void)
{
	int fd = make(O_RDWR | O_CLOEXEC);
	CHECK(lseek(fd, 77, SEEK_SET) == 77);
	for (int i = 0; i < 3; i++) {
		struct line line = make_line();
		pid_t child = i == 1 ? vfork() : fork();
		if (child == 0) {
			if (i == 2) {
				/* A child that stays alive. */
				dup2(line.to_child[0], 0);
				execlp("cat", "cat", NULL);
			}
			execlp("true", "true", NULL);
			_exit(1);
		}
		CHECK(child > 0);
		if (i < 2)
			end(child);
		read_pages(fd, AFTER, 0);
		CHECK(lseek(fd, 0, SEEK_CUR) == 77);
		CHECK(pwrite(fd, "", 1, 40 * PAGE) == 1);
		CHECK(close(line.to_child[1]) == 0);
		if (i == 2)
			end(child);
	}
	CHECK(close(fd) == 0);
}

/* ---- a child that closes the file, one way or another, and stays alive ---- */

static void closes(void)
{
	for (int i = 0; i < 4; i++) {
		int fd = make(O_RDWR), other;
		struct line line = make_line();
		pid_t child = fork();
		if (child == 0) {
			char byte;
			CHECK(pread(fd, &byte, 1, 3 * PAGE) == 1 && byte == 3);
			if (i == 0)
				CHECK(close(fd) == 0);
			else if (i == 1)
				CHECK(dup2(line.to_child[0], fd) == fd);
			else if (i == 2)
				CHECK(close_range(fd, fd, 0) == 0);
			else
				_exit(0);
			say(line.to_parent);
			hear(line.to_child);
			_exit(0);
		}
		CHECK(child > 0);
		if (i < 3)
			hear(line.to_parent);
		else
			end(child);
		read_pages(fd, AFTER, 0);
		if (i < 3) {
			say(line.to_child);
			end(child);
		}
		CHECK(close(fd) == 0);
	}
}

/* ---- a child that is killed ---- */

static void killed(void)
{
	int fd = make(O_RDWR), status;
	struct line line = make_line();
	pid_t child = fork();
	if (child == 0) {
		say(line.to_parent);
		for (;;)
			pause();
	}
	hear(line.to_parent);
	/* The child has the file open. */
	read_pages(fd, 300, 0);
	CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status));
	read_pages(fd, AFTER, 0);
}

/* ---- a grandchild that has the file open after the child has exited ---- */

static void grandchild(int execs)
{
	int fd = make(O_RDWR | O_CLOEXEC);
	struct line line = make_line();
	char page[PAGE];
	pid_t child = fork();
	if (child == 0) {
		if (fork() != 0) {
			if (execs)
				execlp("true", "true", NULL);
			_exit(0);
		}
		for (int i = 0; i < 200; i++) {
			hear(line.to_child);
			memset(page, 100 + i, PAGE);
			CHECK(pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
			CHECK(lseek(fd, i, SEEK_SET) == i);
			say(line.to_parent);
		}
		_exit(0);
	}
	end(child);
	for (int i = 0; i < 200; i++) {
		say(line.to_child);
		hear(line.to_parent);
		CHECK(lseek(fd, 0, SEEK_CUR) == i);
		for (int j = 0; j < 50; j++)
			CHECK(pread(fd, page, PAGE, 5 * PAGE) == PAGE && is_all(page, PAGE, 100 + i));
	}
	memset(page, 5, PAGE);
	CHECK(pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
	/* The end of file shows that no process has the other ends of the pipes, so the grandchild has ended. */
	CHECK(close(line.to_parent[1]) == 0 && read(line.to_parent[0], page, 1) == 0);
	read_pages(fd, 3 * AFTER, 0);
}

/* ---- a program that inherits the file over an exec, and continues at the offset ---- */

enum { KEPT = 30 };

static void kept(const char *self, int spawns)
{
	int fd = make(O_RDWR);
	struct line line = make_line();
	char page[PAGE];
	CHECK(dup2(line.to_child[0], KEPT) == KEPT && dup2(line.to_parent[1], KEPT + 1) == KEPT + 1);
	if (spawns == 2) {
		/* The process that executes has closed the file before; the process that it created has not. */
		CHECK(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
	}
	if (spawns == 3) {
		/* The number belonged to another file before, which an exec would have closed. */
		int other = open("other", O_RDWR | O_CREAT | O_CLOEXEC, 0644);
		CHECK(other >= 0 && dup2(fd, other) == other && close(fd) == 0);
		fd = other;
	}
	pid_t child;
	char number[16];
	snprintf(number, sizeof number, "%d", fd);
	char *arguments[] = {(char *)self, "keeper", number, NULL};
	if (spawns == 1) {
		/* A child of fork spawns the program, and closes the file itself. */
		child = fork();
		if (child == 0) {
			CHECK(posix_spawn(&child, self, NULL, NULL, arguments, environ) == 0);
			CHECK(close(fd) == 0);
			end(child);
			_exit(0);
		}
	} else {
		child = fork();
		if (child == 0) {
			if (spawns == 2) {
				int other = dup(fd);
				CHECK(close(fd) == 0);
				snprintf(number, sizeof number, "%d", other);
			}
			execv(self, arguments);
			_exit(1);
		}
	}
	for (int i = 0; i < 200; i++) {
		CHECK(lseek(fd, (off_t)(i % 8) * PAGE, SEEK_SET) >= 0);
		say(line.to_child);
		hear(line.to_parent);
		CHECK(lseek(fd, 0, SEEK_CUR) == (i % 8 + 1) * PAGE);
		for (int j = 0; j < 50; j++)
			CHECK(pread(fd, page, PAGE, (i % 8) * PAGE) == PAGE && is_all(page, PAGE, 100 + i));
	}
	end(child);
}

static void keeper(int fd)
{
	char page[PAGE], byte;
	for (int i = 0; i < 200; i++) {
		CHECK(read(KEPT, &byte, 1) == 1);
		memset(page, 100 + i, PAGE);
		CHECK(write(fd, page, PAGE) == PAGE && write(KEPT + 1, "x", 1) == 1);
	}
}

/* ---- sent away by a child ---- */

static void sent(void)
{
	int fd = make(O_RDWR), ends[2];
	struct line line = make_line();
	char page[PAGE], control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec byte = {page, 1};
	struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	pid_t receiver = fork();
	if (receiver == 0) {
		CHECK(close(fd) == 0);
		CHECK(recvmsg(ends[0], &message, 0) == 1);
		int got = *(int *)CMSG_DATA(CMSG_FIRSTHDR(&message));
		for (int i = 0; i < 100; i++) {
			hear(line.to_child);
			memset(page, 100 + i, PAGE);
			CHECK(pwrite(got, page, PAGE, 5 * PAGE) == PAGE);
			say(line.to_parent);
		}
		_exit(0);
	}
	pid_t sender = fork();
	if (sender == 0) {
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		*header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
		*(int *)CMSG_DATA(header) = fd;
		page[0] = 0;
		CHECK(sendmsg(ends[1], &message, 0) == 1);
		_exit(0);
	}
	end(sender);
	for (int i = 0; i < 100; i++) {
		say(line.to_child);
		hear(line.to_parent);
		for (int j = 0; j < 50; j++)
			CHECK(pread(fd, page, PAGE, 5 * PAGE) == PAGE && is_all(page, PAGE, 100 + i));
	}
	end(receiver);
}

/* ---- mapped by a child, which closes the descriptor ---- */

static void mapped(int is_private)
{
	int fd = make(O_RDWR);
	struct line line = make_line();
	char page[PAGE];
	pid_t child = fork();
	if (child == 0) {
		int kind = is_private ? MAP_PRIVATE : MAP_SHARED;
		char *memory = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, kind, fd, 5 * PAGE);
		CHECK(memory != MAP_FAILED && close(fd) == 0);
		for (int i = 0; i < 100; i++) {
			hear(line.to_child);
			/* A private mapping shows the file's bytes, as long as the process does not write to it. */
			CHECK(!is_private || is_all(memory, PAGE, 100 + i));
			if (!is_private)
				memset(memory, 100 + i, PAGE);
			say(line.to_parent);
		}
		_exit(0);
	}
	for (int i = 0; i < 100; i++) {
		memset(page, 100 + i, PAGE);
		CHECK(!is_private || pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
		say(line.to_child);
		hear(line.to_parent);
		for (int j = 0; j < 50; j++)
			CHECK(pread(fd, page, PAGE, 5 * PAGE) == PAGE && is_all(page, PAGE, 100 + i));
	}
	end(child);
	memset(page, 5, PAGE);
	CHECK(pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
	read_pages(fd, 2 * AFTER, 0);
}

/* ---- the parent exits first ---- */

static void orphan(int closes)
{
	struct line line = make_line();
	CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	pid_t parent = fork();
	if (parent == 0) {
		int fd = make(O_RDWR | O_CLOEXEC);
		CHECK(lseek(fd, 99, SEEK_SET) == 99);
		pid_t child = fork();
		if (child == 0) {
			hear(line.to_child);
			read_pages(fd, AFTER, 0);
			CHECK(lseek(fd, 0, SEEK_CUR) == 99);
			say(line.to_parent);
			exit(0);
		}
		if (closes) {
			CHECK(close(fd) == 0);
			say(line.to_child);
			end(child);
		}
		exit(0);
	}
	end(parent);
	if (!closes) {
		say(line.to_child);
		CHECK(wait(NULL) > 0);
	}
	hear(line.to_parent);
}

/* ---- a server with worker processes ---- */

static void server(void)
{
	int fd = make(O_RDWR | O_CLOEXEC);
	for (int i = 0; i < 30; i++) {
		if (i % 3 == 0) {
			CHECK(system("true") == 0);
		} else if (i % 3 == 1) {
			FILE *output = popen("echo here", "r");
			char text[8];
			CHECK(output && fgets(text, sizeof text, output) && !strcmp(text, "here\n") && pclose(output) == 0);
		} else {
			pid_t child = fork();
			if (child == 0) {
				execlp("true", "true", NULL);
				_exit(1);
			}
			end(child);
		}
		read_pages(fd, 2000, 0);
	}
}

/* ---- a stream, which only --eager serves ---- */

static void stream(void)
{
	char part[256];
	make_pages("f", 0);
	FILE *file = fopen("f", "r+e");
	CHECK(file && fread(part, 1, sizeof part, file) == sizeof part);
	pid_t child = fork();
	if (child == 0) {
		execlp("true", "true", NULL);
		_exit(1);
	}
	end(child);
	for (int i = 0; i < AFTER; i++) {
		CHECK(fseek(file, (long)(i % 64) * PAGE, SEEK_SET) == 0);
		CHECK(fread(part, 1, sizeof part, file) == sizeof part && is_all(part, sizeof part, i % 64));
	}
	CHECK(fclose(file) == 0);
}

/* ---- several descriptions of one file; a child keeps one of them for a while ---- */

static void several(void)
{
	int fd = make(O_RDWR | O_CLOEXEC), other = open("f", O_RDONLY | O_CLOEXEC);
	struct line line = make_line();
	char page[PAGE];
	CHECK(other >= 0);
	read_pages(other, BEFORE, 0);
	pid_t child = fork();
	if (child == 0) {
		CHECK(close(fd) == 0);
		for (int i = 0; i < 100; i++) {
			hear(line.to_child);
			CHECK(read(other, page, 10) == 10 && is_all(page, 10, 0));
			say(line.to_parent);
		}
		_exit(0);
	}
	for (int i = 0; i < 100; i++) {
		say(line.to_child);
		hear(line.to_parent);
		CHECK(lseek(other, 0, SEEK_CUR) == (i + 1) * 10);
		read_pages(fd, 20, 0);
		read_pages(other, 20, 0);
	}
	end(child);
	for (int i = 0; i < AFTER / 100; i++) {
		read_pages(fd, 100, 0);
		read_pages(other, 100, 0);
	}
}

/* ---- a lock that a child takes, whose parent held one ---- */

static short lock(int fd, int command, short type)
{
	struct flock first = {.l_type = type, .l_whence = SEEK_SET, .l_len = 1};
	CHECK(fcntl(fd, command, &first) == 0);
	return first.l_type;
}

static void locks(void)
{
	int fd = make(O_RDWR);
	struct line line = make_line();
	lock(fd, F_SETLK, F_WRLCK);
	pid_t child = fork();
	if (child == 0) {
		hear(line.to_child);
		lock(fd, F_SETLK, F_WRLCK);
		read_pages(fd, AFTER, 0);
		say(line.to_parent);
		hear(line.to_child);
		read_pages(fd, 100, 0);
		_exit(0);
	}
	CHECK(close(fd) == 0);
	say(line.to_child);
	hear(line.to_parent);
	/* The file is handed over. */
	fd = open("f", O_RDWR);
	CHECK(fd >= 0);
	for (int i = 0; i < 100; i++) {
		CHECK(lock(fd, F_GETLK, F_WRLCK) == F_WRLCK);
		usleep(1000);
	}
	say(line.to_child);
	end(child);
}

/* ---- calls that continue while another thread closes ---- */

enum { LONG = 4096 };

static int racing;
static char *much;

static void *write_on(void *unused)
{
	/* The rest of the write continues after the number is closed. */
	CHECK(pwrite(racing, much, LONG * PAGE, 0) == LONG * PAGE);
	return NULL;
}

static void races(void)
{
	char page[PAGE];
	much = malloc(LONG * PAGE);
	for (int round = 1; round <= scaled(5, 3); round++) {
		CHECK((racing = open("g", O_RDWR | O_CREAT, 0644)) >= 0);
		CHECK(ftruncate(racing, LONG * PAGE) == 0);
		memset(much, round, LONG * PAGE);
		struct line line = make_line();
		pid_t child = fork();
		if (child == 0) {
			pthread_t thread;
			CHECK(pthread_create(&thread, NULL, write_on, NULL) == 0);
			/* The write has begun. */
			do
				CHECK(pread(racing, page, 1, 0) == 1);
			while (page[0] != round);
			CHECK(close(racing) == 0 && pthread_join(thread, NULL) == 0);
			say(line.to_parent);
			hear(line.to_child);
			_exit(0);
		}
		CHECK(fcntl(line.to_parent[0], F_SETFL, O_NONBLOCK) == 0);
		while (read(line.to_parent[0], page, 1) < 0)
			CHECK(pread(racing, page, PAGE, (LONG - 1) * PAGE) == PAGE);
		CHECK(pread(racing, page, PAGE, (LONG - 1) * PAGE) == PAGE && is_all(page, PAGE, round));
		say(line.to_child);
		end(child);
		CHECK(close(racing) == 0 && close(line.to_child[0]) == 0 && close(line.to_child[1]) == 0);
		CHECK(close(line.to_parent[0]) == 0 && close(line.to_parent[1]) == 0);
	}
}

/* ---- numbers that a child can't have, when no other numbers are free ---- */

enum { HIGH = 100, LIMIT = 50 };

static void limit_numbers(void)
{
	struct rlimit limit;
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = LIMIT;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* A read of `fd` returns page `page_at`, or fails with EBADF. */
static void read_or_fail(int fd, int page_at)
{
	char page[PAGE];
	ssize_t count = read(fd, page, PAGE);
	CHECK(count == PAGE ? is_all(page, PAGE, page_at) : count == -1 && errno == EBADF);
}

static void hidden(int is_full)
{
	int fd = make(O_RDWR), pads[HIGH], count = 0, other;
	while (!is_full && (pads[count] = open("/dev/null", O_RDONLY)) < HIGH)
		count++;
	if (!is_full)
		CHECK(close(pads[count]) == 0);
	CHECK((other = open("f", O_RDONLY)) >= 0);
	while (count > 0)
		CHECK(close(pads[--count]) == 0);
	for (int i = 0; i < 20; i++) {
		read_pages(fd, 300, 0);
		read_pages(other, 300, 0);
	}
	/* The library uses one description for both, and continues to. */
	lock(fd, F_SETLK, F_WRLCK);
	read_pages(other, 300, 0);
	CHECK(lseek(fd, 9 * PAGE, SEEK_SET) >= 0 && lseek(other, 5 * PAGE, SEEK_SET) >= 0);
	limit_numbers();
	while (is_full && open("/dev/null", O_RDONLY) >= 0)
		;
	pid_t child = fork();
	if (child == 0) {
		int next = open("other", O_RDWR | O_CREAT, 0644);
		CHECK(next != fd && next != other && (!is_full || next == -1));
		read_or_fail(other, 5);
		read_or_fail(fd, 9);
		CHECK(write(other, "", 1) == -1 && errno == EBADF);
		_exit(0);
	}
	end(child);
	CHECK(lseek(fd, 0, SEEK_CUR) % PAGE == 0);
	read_pages(fd, 300, 0);
	read_pages(other, 300, 0);
}

/* ---- opens during a fork: the parent reads the child's writes to the descriptor that it inherited ---- */

static volatile int shown, is_over;

static void *open_on(void *unused)
{
	while (!is_over) {
		int fd = open("f", O_RDWR);
		CHECK(fd >= 0);
		shown = fd;
		while (shown == fd && !is_over)
			;
	}
	return NULL;
}

/* The descriptor of "f" in this process; -1: none. */
static int find(void)
{
	struct stat wanted, found;
	CHECK(stat("f", &wanted) == 0);
	for (int fd = 0; fd < 64; fd++)
		if (fstat(fd, &found) == 0 && found.st_ino == wanted.st_ino)
			return fd;
	return -1;
}

static void opens(void)
{
	/* This much memory makes a fork slow. */
	size_t bytes = (size_t)64 << 20;
	char page[PAGE], *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	make_pages("f", 0);
	CHECK(memory != MAP_FAILED && madvise(memory, bytes, MADV_NOHUGEPAGE) == 0);
	memset(memory, 1, bytes);
	for (int round = 0; round < scaled(80, 40); round++) {
		pthread_t thread;
		struct line line = make_line();
		shown = -1;
		is_over = 0;
		CHECK(pthread_create(&thread, NULL, open_on, NULL) == 0);
		for (volatile int i = 0; i < round % 40 * 500; i++)
			;
		pid_t child = fork();
		if (child == 0) {
			int has = find();
			/* The child ends with its parent. */
			CHECK(close(line.to_child[1]) == 0);
			CHECK(write(line.to_parent[1], has < 0 ? "n" : "y", 1) == 1);
			for (int i = 0; has >= 0 && i < 5; i++) {
				hear(line.to_child);
				memset(page, 100 + i, PAGE);
				CHECK(pwrite(has, page, PAGE, 5 * PAGE) == PAGE);
				say(line.to_parent);
			}
			_exit(0);
		}
		char answer;
		CHECK(read(line.to_parent[0], &answer, 1) == 1);
		while (shown < 0)
			;
		int fd = shown;
		is_over = 1;
		CHECK(pthread_join(thread, NULL) == 0);
		for (int i = 0; answer == 'y' && i < 5; i++) {
			read_pages(fd, 5, 0);
			for (int j = 0; j < 300; j++)
				CHECK(pread(fd, page, PAGE, 6 * PAGE) == PAGE && is_all(page, PAGE, 6));
			say(line.to_child);
			hear(line.to_parent);
			CHECK(pread(fd, page, PAGE, 5 * PAGE) == PAGE && is_all(page, PAGE, 100 + i));
			memset(page, 5, PAGE);
			CHECK(pwrite(fd, page, PAGE, 5 * PAGE) == PAGE);
		}
		end(child);
		CHECK(close(fd) == 0 && close(line.to_child[0]) == 0 && close(line.to_child[1]) == 0);
		CHECK(close(line.to_parent[0]) == 0 && close(line.to_parent[1]) == 0);
	}
}

int main(int count, char **arguments)
{
	const char *name = count > 1 ? arguments[1] : "";
	int times = count > 2 ? atoi(arguments[2]) : 0;
	alarm(200);
	if (!strcmp(name, "execs"))
		execs();
	else if (!strcmp(name, "closes"))
		closes();
	else if (!strcmp(name, "killed"))
		killed();
	else if (!strcmp(name, "grandchild"))
		grandchild(times);
	else if (!strcmp(name, "kept"))
		kept(arguments[0], times);
	else if (!strcmp(name, "keeper"))
		keeper(times);
	else if (!strcmp(name, "sent"))
		sent();
	else if (!strcmp(name, "mapped"))
		mapped(times);
	else if (!strcmp(name, "orphan"))
		orphan(times);
	else if (!strcmp(name, "server"))
		server();
	else if (!strcmp(name, "stream"))
		stream();
	else if (!strcmp(name, "several"))
		several();
	else if (!strcmp(name, "locks"))
		locks();
	else if (!strcmp(name, "races"))
		races();
	else if (!strcmp(name, "hidden"))
		hidden(times);
	else if (!strcmp(name, "opens"))
		opens();
	else
		return 2;
	return 0;
}
