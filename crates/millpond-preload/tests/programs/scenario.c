/* One scenario each, by name. Prints nothing and returns 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static int make(const char *name, int flags)
{
	make_pages(name, 0);
	int fd = open(name, flags);
	CHECK(fd >= 0);
	return fd;
}

/* The kernel's view, past every hook: this file's own system call, on a new description. */
static long raw(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
	return result;
}

/* ---- close racing with reads on other threads ---- */

static volatile int race_fd, race_over;

static void *race_reader(void *unused)
{
	unsigned char page[PAGE];
	while (!race_over) {
		for (int i = 0; i < PAGES; i += 7) {
			ssize_t n = pread(race_fd, page, PAGE, (off_t)i * PAGE);
			if (n < 0) {
				CHECK(errno == EBADF);
				continue;
			}
			/* Two files alternate under one number: each page that is read belongs to one of them. */
			CHECK(n == PAGE && (is_all(page, PAGE, i) || is_all(page, PAGE, i + 1)));
		}
	}
	return NULL;
}

static void close_race(void)
{
	int a = make("a", O_RDONLY), b = make("b", O_RDWR);
	unsigned char page[PAGE];
	for (int i = 0; i < PAGES; i++) {
		memset(page, i + 1, PAGE);
		CHECK(pwrite(b, page, PAGE, (off_t)i * PAGE) == PAGE);
	}
	close(a);
	close(b);
	/* With many threads libc's malloc asks for the number of processors, of a file: for a moment that has
	   the number that is closed and opened below. */
	mallopt(M_ARENA_MAX, 4);
	race_fd = open("a", O_RDONLY);
	pthread_t threads[3];
	for (int i = 0; i < 3; i++)
		pthread_create(&threads[i], NULL, race_reader, NULL);
	for (int i = 0; i < scaled(4000, 1000); i++) {
		CHECK(close(race_fd) == 0);
		CHECK(open(i & 1 ? "a" : "b", O_RDONLY) == race_fd);
		if (i % 3 == 0)
			for (int j = 0; j < 20; j++)
				pread(race_fd, page, PAGE, (off_t)(j * 7) * PAGE);
	}
	race_over = 1;
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
}

/* ---- one offset, many threads ---- */

static int shared_fd;
static unsigned char seen[1 << 16];

static void *offset_reader(void *unused)
{
	uint32_t record[4];
	ssize_t n;
	while ((n = read(shared_fd, record, sizeof record)) > 0) {
		CHECK(n == sizeof record);
		CHECK(record[0] == record[3] && record[0] < sizeof seen);
		CHECK(__atomic_fetch_add(&seen[record[0]], 1, __ATOMIC_RELAXED) == 0);
	}
	CHECK(n == 0);
	return NULL;
}

static void shared_offset(void)
{
	int fd = open("records", O_RDWR | O_CREAT, 0644);
	for (uint32_t i = 0; i < sizeof seen; i++) {
		uint32_t record[4] = {i, i, i, i};
		CHECK(write(fd, record, sizeof record) == sizeof record);
	}
	for (int round = 0; round < 3; round++) {
		memset(seen, 0, sizeof seen);
		CHECK(lseek(fd, 0, SEEK_SET) == 0);
		shared_fd = round ? dup(fd) : fd;
		pthread_t threads[4];
		for (int i = 0; i < 4; i++)
			pthread_create(&threads[i], NULL, offset_reader, NULL);
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
		CHECK(is_all(seen, sizeof seen, 1));
		CHECK(lseek(fd, 0, SEEK_CUR) == sizeof seen * 16L);
	}
}

/* ---- appends from two descriptors and two threads ---- */

static void *appender(void *argument)
{
	int fd = (int)(intptr_t)argument;
	char line[32];
	for (int i = 0; i < 2000; i++) {
		int n = snprintf(line, sizeof line, "%d %06d\n", fd % 10, i);
		CHECK(write(fd, line, n) == n);
	}
	return NULL;
}

static void append(void)
{
	int a = open("log", O_WRONLY | O_CREAT | O_APPEND, 0644), b = open("log", O_WRONLY | O_APPEND);
	pthread_t threads[3];
	pthread_create(&threads[0], NULL, appender, (void *)(intptr_t)a);
	pthread_create(&threads[1], NULL, appender, (void *)(intptr_t)b);
	pthread_create(&threads[2], NULL, appender, (void *)(intptr_t)a);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
	struct stat st;
	CHECK(fstat(a, &st) == 0 && st.st_size == 6000 * 9);
	close(b);
	close(a);
	a = open("log", O_RDWR | O_APPEND);
	CHECK(write(a, "x", 1) == 1 && lseek(a, 0, SEEK_CUR) == 54001);
	CHECK(pwrite(a, "y", 1, 0) == 1 && lseek(a, 0, SEEK_CUR) == 54001);
	char end[2];
	CHECK(pread(a, end, 2, 54000) == 2 && memcmp(end, "xy", 2) == 0);
}

/* ---- bad memory ---- */

static volatile sig_atomic_t handled;
static sigjmp_buf out;

static void on_fault(int signal, siginfo_t *info, void *context)
{
	handled++;
	siglongjmp(out, 1);
}

static void faults(void)
{
	int fd = make("f", O_RDWR);
	char *bad = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char good[2 * PAGE];
	memset(bad, 'b', 3 * PAGE);
	mprotect(bad + PAGE, PAGE, PROT_NONE);
	mprotect(bad + 2 * PAGE, PAGE, PROT_READ);
	int other = open("short", O_RDWR | O_CREAT, 0644);
	char *beyond = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, other, 0);
	for (int round = 0; round < 3; round++) {
		errno = 0;
		CHECK(pread(fd, bad + PAGE, 100, 0) == -1 && errno == EFAULT);
		errno = 0;
		CHECK(pread(fd, bad + 2 * PAGE, 100, 0) == -1 && errno == EFAULT);
		errno = 0;
		CHECK(pwrite(fd, bad + PAGE, 100, 0) == -1 && errno == EFAULT);
		CHECK(pwrite(fd, bad + 2 * PAGE, 1, 5 * PAGE) == 1);
		errno = 0;
		CHECK(read(fd, beyond, 100) == -1 && errno == EFAULT && lseek(fd, 0, SEEK_CUR) == 0);
		errno = 0;
		CHECK(write(fd, beyond, 100) == -1 && errno == EFAULT && lseek(fd, 0, SEEK_CUR) == 0);
		/* Partly good memory: the same byte count as from the kernel, and no more. */
		ssize_t n = pread(fd, bad + PAGE - 50, 100, 0);
		CHECK(n == raw(SYS_pread64, fd, (long)(bad + PAGE - 50), 100, 0));
		n = pwrite(fd, bad + PAGE - 50, 100, 3 * PAGE + 10);
		CHECK(n == -1 || (n > 0 && n <= 50));
		CHECK(pread(fd, good, 200, 3 * PAGE) == 200);
		char kernel[200];
		CHECK(raw(SYS_pread64, fd, (long)kernel, 200, 3 * PAGE) == 200 && memcmp(good, kernel, 200) == 0);
	}
	/* The program's own handler: set late, queried, called, reset. */
	struct sigaction act = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, old;
	CHECK(sigaction(SIGSEGV, &act, &old) == 0 && old.sa_handler == SIG_DFL);
	CHECK(sigaction(SIGBUS, &act, NULL) == 0);
	CHECK(sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_sigaction == on_fault);
	for (int i = 0; i < 3; i++) {
		if (sigsetjmp(out, 1) == 0)
			*(volatile char *)(bad + PAGE) = 1;
		if (sigsetjmp(out, 1) == 0)
			*(volatile char *)beyond = 1;
		errno = 0;
		CHECK(pread(fd, bad + PAGE, 100, 0) == -1 && errno == EFAULT);
	}
	CHECK(handled == 6);
	CHECK(signal(SIGSEGV, SIG_DFL) == (void *)on_fault);
	pid_t child = fork();
	if (child == 0) {
		*(volatile char *)(bad + PAGE) = 1;
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
}

/* ---- handlers that use the file that their thread is using ---- */

static int sig_fd;
static volatile long sig_calls;

static void on_alarm(int signal)
{
	int e = errno;
	unsigned char page[PAGE];
	int i = sig_calls++ % PAGES;
	CHECK(pread(sig_fd, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, i));
	CHECK(pwrite(sig_fd, page, PAGE, (off_t)i * PAGE) == PAGE);
	off_t at = lseek(sig_fd, 0, SEEK_CUR);
	CHECK(at >= 0);
	int fd = open("other", O_RDWR | O_CREAT, 0644);
	CHECK(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0);
	errno = e;
}

static void signals(void)
{
	sig_fd = make("f", O_RDWR);
	struct sigaction act = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	sigaction(SIGALRM, &act, NULL);
	struct itimerval timer = {{0, 2000}, {0, 2000}};
	setitimer(ITIMER_REAL, &timer, NULL);
	unsigned char page[PAGE];
	time_t end = time(NULL) + scaled(3, 2);
	/* Few signals may arrive on a busy machine. */
	while (time(NULL) < end || sig_calls <= 100) {
		for (int i = 0; i < PAGES; i++) {
			CHECK(lseek(sig_fd, (off_t)i * PAGE, SEEK_SET) == (off_t)i * PAGE);
			CHECK(read(sig_fd, page, PAGE) == PAGE && is_all(page, PAGE, i));
			CHECK(pwrite(sig_fd, page, PAGE, (off_t)i * PAGE) == PAGE);
			int fd = open("more", O_RDWR | O_CREAT, 0644);
			CHECK(fd >= 0 && close(fd) == 0);
			free(malloc(100));
		}
	}
	timer = (struct itimerval){{0, 0}, {0, 0}};
	setitimer(ITIMER_REAL, &timer, NULL);
}

/* ---- fork, exec, spawn ---- */

static void forks(void)
{
	int fd = make("f", O_RDWR), to_child[2], to_parent[2];
	unsigned char page[PAGE];
	CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
	CHECK(read(fd, page, PAGE) == PAGE && is_all(page, PAGE, 0));
	CHECK(lseek(fd, 5 * PAGE, SEEK_SET) == 5 * PAGE);
	pid_t child = fork();
	if (child == 0) {
		CHECK(read(fd, page, PAGE) == PAGE && is_all(page, PAGE, 5));
		memset(page, 0xcc, PAGE);
		CHECK(pwrite(fd, page, PAGE, 9 * PAGE) == PAGE);
		CHECK(write(to_parent[1], "x", 1) == 1 && read(to_child[0], page, 1) == 1);
		CHECK(pread(fd, page, PAGE, 10 * PAGE) == PAGE && is_all(page, PAGE, 0xdd));
		/* The child's own opens are served. */
		int own = make("own", O_RDWR);
		for (int i = 0; i < PAGES; i++)
			CHECK(pread(own, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, i));
		exit(0);
	}
	CHECK(read(to_parent[0], page, 1) == 1);
	CHECK(lseek(fd, 0, SEEK_CUR) == 6 * PAGE);
	CHECK(read(fd, page, PAGE) == PAGE && is_all(page, PAGE, 6));
	CHECK(pread(fd, page, PAGE, 9 * PAGE) == PAGE && is_all(page, PAGE, 0xcc));
	memset(page, 0xdd, PAGE);
	CHECK(pwrite(fd, page, PAGE, 10 * PAGE) == PAGE);
	CHECK(write(to_child[1], "y", 1) == 1);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	/* The parent's later opens are served, too. */
	int again = make("again", O_RDWR);
	for (int i = 0; i < PAGES; i++)
		CHECK(pread(again, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, i));
	/* A spawned program continues at the parent's offset, on its standard input. */
	CHECK(lseek(again, 3, SEEK_SET) == 3);
	posix_spawn_file_actions_t actions;
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, again, 0);
	posix_spawn_file_actions_addopen(&actions, 1, "copy", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	char *argv[] = {"cat", NULL};
	extern char **environ;
	CHECK(posix_spawnp(&child, "cat", &actions, NULL, argv, environ) == 0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	struct stat st;
	CHECK(stat("copy", &st) == 0 && st.st_size == PAGES * PAGE - 3);
	CHECK(lseek(again, 0, SEEK_CUR) == PAGES * PAGE);
	/* exec keeps descriptors that are not close-on-exec, at their offset. */
	close(0);
	int last = make("last", O_RDONLY);
	CHECK(last == 0 && lseek(last, 7, SEEK_SET) == 7);
	child = vfork();
	if (child == 0) {
		execl("/bin/sh", "sh", "-c", "cat >copy2", (char *)NULL);
		_exit(1);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(stat("copy2", &st) == 0 && st.st_size == PAGES * PAGE - 7);
}

/* ---- forks concurrent with threads that open, lock and close ---- */

static volatile int fork_over;

static void *opener(void *name)
{
	struct flock whole = {.l_whence = SEEK_SET};
	while (!fork_over) {
		int fd = open(name, O_RDWR);
		char byte;
		CHECK(fd >= 0 && pread(fd, &byte, 1, 0) == 1);
		whole.l_type = F_WRLCK;
		CHECK(fcntl(fd, F_SETLK, &whole) == 0);
		whole.l_type = F_UNLCK;
		CHECK(fcntl(fd, F_SETLK, &whole) == 0);
		CHECK(close(fd) == 0);
	}
	return NULL;
}

static void fork_race(void)
{
	static char names[3][8] = {"a", "b", "c"};
	pthread_t threads[3];
	/* The alarm ends a hang. */
	alarm(120);
	for (int i = 0; i < 3; i++) {
		make_pages(names[i], i);
		pthread_create(&threads[i], NULL, opener, names[i]);
	}
	for (int i = 0; i < 150; i++) {
		pid_t child = fork();
		int status;
		CHECK(child >= 0);
		if (child == 0) {
			int fd = open("a", O_RDONLY);
			_exit(fd < 0 || close(fd) != 0);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	}
	fork_over = 1;
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
}

/* ---- another process ---- */

static void other_process(void)
{
	/* Forked before any file is open, so that no file is passed for that reason. */
	int to_helper[2], to_us[2];
	CHECK(pipe(to_helper) == 0 && pipe(to_us) == 0);
	pid_t helper = fork();
	if (helper == 0) {
		unsetenv("LD_PRELOAD");
		dup2(to_helper[0], 0);
		dup2(to_us[1], 1);
		close(to_helper[1]);
		close(to_us[0]);
		execl("/bin/sh", "sh", "-c",
		      "read x; printf changed >> f; printf CHANGED | dd of=f conv=notrunc status=none; echo ok;"
		      "read x; exec 5<>g; echo ok; read x; printf held >&5; echo ok; read x", (char *)NULL);
		_exit(1);
	}
	unsigned char page[PAGE];
	int fd = make("f", O_RDONLY);
	for (int i = 0; i < PAGES; i++)
		CHECK(pread(fd, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, i));
	CHECK(lseek(fd, 3, SEEK_SET) == 3);
	CHECK(write(to_helper[1], "\n", 1) == 1 && read(to_us[0], page, 3) == 3);
	/* The helper wrote these bytes through an open later than this process's. */
	CHECK(pread(fd, page, 7, 0) == 7 && memcmp(page, "CHANGED", 7) == 0);
	CHECK(pread(fd, page, 100, PAGES * PAGE) == 7 && memcmp(page, "changed", 7) == 0);
	CHECK(read(fd, page, 4) == 4 && memcmp(page, "NGED", 4) == 0);
	/* The helper holds this file open for writing when this process opens it. */
	close(make("g", O_RDONLY));
	CHECK(write(to_helper[1], "\n", 1) == 1 && read(to_us[0], page, 3) == 3);
	fd = open("g", O_RDONLY);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 0));
	CHECK(write(to_helper[1], "\n", 1) == 1 && read(to_us[0], page, 3) == 3);
	CHECK(pread(fd, page, 4, 0) == 4 && memcmp(page, "held", 4) == 0);
	close(to_helper[1]);
	int status;
	CHECK(waitpid(helper, &status, 0) == helper);
}

/* ---- a descriptor sent to another process ---- */

static void sent(void)
{
	int pair[2];
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
	pid_t child = fork();
	char control[CMSG_SPACE(sizeof(int))], byte = 'x';
	struct iovec v = {&byte, 1};
	struct msghdr message = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	unsigned char page[PAGE];
	if (child == 0) {
		CHECK(recvmsg(pair[1], &message, 0) == 1);
		int fd;
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
		CHECK(read(fd, page, PAGE) == PAGE && is_all(page, PAGE, 20));
		memset(page, 0xee, PAGE);
		CHECK(write(fd, page, PAGE) == PAGE);
		exit(0);
	}
	int fd = make("f", O_RDWR);
	CHECK(lseek(fd, 20 * PAGE, SEEK_SET) == 20 * PAGE);
	CHECK(pread(fd, page, PAGE, 21 * PAGE) == PAGE);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof fd);
	memcpy(CMSG_DATA(header), &fd, sizeof fd);
	CHECK(sendmsg(pair[0], &message, 0) == 1);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(lseek(fd, 0, SEEK_CUR) == 22 * PAGE);
	CHECK(pread(fd, page, PAGE, 21 * PAGE) == PAGE && is_all(page, PAGE, 0xee));
}

/* ---- locks and closes ---- */

static void locks(void)
{
	int a = make("f", O_RDWR);
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_CUR, .l_start = 10, .l_len = 5}, probe;
	CHECK(lseek(a, 100, SEEK_SET) == 100);
	CHECK(fcntl(a, F_SETLK, &lock) == 0);
	pid_t child = fork();
	if (child == 0) {
		int fd = open("f", O_RDWR);
		probe = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 0};
		CHECK(fcntl(fd, F_GETLK, &probe) == 0);
		CHECK(probe.l_type == F_WRLCK && probe.l_start == 110 && probe.l_len == 5);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	/* A daemon's loop closes all descriptors: the library's own stay open, the program's do not. */
	int b = make("b", O_RDWR);
	char byte;
	CHECK(pread(b, &byte, 1, 0) == 1);
	for (int fd = 3; fd < 2000; fd++)
		close(fd);
	CHECK(pread(b, &byte, 1, 0) == -1 && errno == EBADF);
	b = make("b", O_RDWR);
	CHECK(b == 3 && pread(b, &byte, 1, 5 * PAGE) == 1 && byte == 5);
	CHECK(close_range(3, ~0U, 0) == 0);
	CHECK(pread(b, &byte, 1, 0) == -1 && errno == EBADF);
	b = make("b", O_RDWR);
	CHECK(b == 3 && pread(b, &byte, 1, 6 * PAGE) == 1 && byte == 6);
	closefrom(3);
	CHECK(pread(b, &byte, 1, 0) == -1 && errno == EBADF);
	/* The lowest number is always the number that POSIX requires. */
	int first = open("b", O_RDONLY), second = open("f", O_RDWR), third = open("b", O_RDONLY);
	CHECK(first == 3 && second == 4 && third == 5);
	close(second);
	CHECK(dup(first) == 4);
}

/* ---- a file removed, renamed, cut by path ---- */

static void under_foot(void)
{
	int fd = make("f", O_RDWR);
	unsigned char page[PAGE];
	CHECK(pread(fd, page, PAGE, 7 * PAGE) == PAGE);
	CHECK(unlink("f") == 0);
	CHECK(pread(fd, page, PAGE, 7 * PAGE) == PAGE && is_all(page, PAGE, 7));
	CHECK(pwrite(fd, "new", 3, 7 * PAGE) == 3 && pread(fd, page, PAGE, 7 * PAGE) == PAGE);
	CHECK(memcmp(page, "new", 3) == 0);
	int other = make("f", O_RDWR);
	CHECK(pread(other, page, PAGE, 7 * PAGE) == PAGE && is_all(page, PAGE, 7));
	CHECK(rename("f", "g") == 0 && pread(other, page, PAGE, 8 * PAGE) == PAGE && is_all(page, PAGE, 8));
	CHECK(truncate("g", 2 * PAGE) == 0);
	CHECK(pread(other, page, PAGE, 7 * PAGE) == 0 && pread(other, page, PAGE, PAGE) == PAGE);
	int third = open("g", O_RDWR | O_TRUNC);
	CHECK(third >= 0 && pread(other, page, PAGE, PAGE) == 0);
	struct stat st;
	CHECK(fstat(other, &st) == 0 && st.st_size == 0);
}

/* ---- as many open files as the limit allows ---- */

static void many_files(void)
{
	struct rlimit limit = {256, 256};
	unsigned char page[PAGE];
	char name[32];
	int fds[400], n;
	CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (n = 0; n < 250; n++) {
		snprintf(name, sizeof name, "many%d", n);
		memset(page, n, PAGE);
		CHECK((fds[n] = open(name, O_RDWR | O_CREAT, 0644)) >= 0);
		CHECK(write(fds[n], page, PAGE) == PAGE);
	}
	while (open("many0", O_RDONLY) >= 0)
		;
	CHECK(errno == EMFILE);
	for (n = 0; n < 250; n++) {
		CHECK(lseek(fds[n], 0, SEEK_CUR) == PAGE);
		CHECK(pread(fds[n], page, PAGE, 0) == PAGE && is_all(page, PAGE, n));
		CHECK(close(fds[n]) == 0);
	}
}

/* ---- the same, by calls that turn other descriptors into these numbers ---- */

static void many_numbers(void)
{
	/* The numbers of the library's report are not available. */
	enum { FILES = 100, LIMIT = 256, REPORT = 3 };
	struct rlimit limit;
	unsigned char page[PAGE];
	char name[32];
	int fds[FILES], n = 0, last = 0;
	CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (limit.rlim_max != LIMIT) {
		/* The library takes its numbers from the upper half of the range that is allowed when it is loaded. */
		limit = (struct rlimit){LIMIT, LIMIT};
		CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
		execl("/proc/self/exe", "scenario", "many_numbers", NULL);
		CHECK(0);
	}
	for (n = 0; n < FILES; n++) {
		snprintf(name, sizeof name, "many%d", n);
		memset(page, n, PAGE);
		CHECK((fds[n] = open(name, O_RDWR | O_CREAT, 0644)) >= 0);
		CHECK(write(fds[n], page, PAGE) == PAGE);
	}
	for (int i = 0;; i++) {
		int fd = i % 2 ? dup(fds[i % FILES]) : fcntl(fds[i % FILES], F_DUPFD_CLOEXEC, 0);
		if (fd < 0)
			break;
		CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, i % FILES));
		last = i;
	}
	CHECK(errno == EMFILE);
	CHECK(last + 1 + FILES + 3 >= LIMIT - REPORT);
	for (n = 0; n < FILES; n++) {
		CHECK(lseek(fds[n], 0, SEEK_CUR) == PAGE);
		CHECK(pread(fds[n], page, PAGE, 0) == PAGE && is_all(page, PAGE, n));
	}
	/* The report needs a number, too. */
	for (n = 3; n < LIMIT; n++)
		close(n);
}

/* ---- two processes that alternate, both served, each with the file open when the other writes ---- */

static void *storm_reader(void *argument)
{
	/* All its reads are hits. They may return torn bytes: ext4 does the same under a concurrent write. */
	int fd = (int)(intptr_t)argument;
	unsigned char page[PAGE];
	while (!race_over)
		for (int i = 0; i < 16; i++)
			CHECK(pread(fd, page, PAGE, (off_t)i * PAGE) == PAGE);
	return NULL;
}

static void write_all(int value)
{
	unsigned char page[PAGE];
	int fd = open("f", O_RDWR);
	CHECK(fd >= 0);
	memset(page, value, PAGE);
	for (int i = 0; i < 16; i++)
		CHECK(pwrite(fd, page, PAGE, (off_t)i * PAGE) == PAGE);
	CHECK(close(fd) == 0);
}

static void read_all(int fd, int value)
{
	unsigned char page[PAGE];
	for (int i = 0; i < 16; i++)
		CHECK(pread(fd, page, PAGE, (off_t)i * PAGE) == PAGE && is_all(page, PAGE, value));
}

static void turn_taker(int in, int out, int first)
{
	char byte;
	/* The round number fits in a byte. */
	int rounds = scaled(200, 60) < 200 ? scaled(200, 60) : 200;
	for (int round = first; round < rounds; round += 2) {
		int fd = open("f", O_RDONLY);
		CHECK(fd >= 0);
		pthread_t thread;
		race_over = 0;
		pthread_create(&thread, NULL, storm_reader, (void *)(intptr_t)fd);
		/* The other process's turn: it opens, writes and closes while this process's reader runs. */
		if (round > 0) {
			CHECK(read(in, &byte, 1) == 1 && (unsigned char)byte == round);
			read_all(fd, round);
		}
		race_over = 1;
		pthread_join(thread, NULL);
		close(fd);
		fd = open("f", O_RDONLY);
		if (round > 0)
			read_all(fd, round);
		if (round & 2)
			close(fd);
		write_all(round + 1);
		if (!(round & 2)) {
			read_all(fd, round + 1);
			close(fd);
		}
		byte = (char)(round + 1);
		CHECK(write(out, &byte, 1) == 1);
	}
}

static void take_turns(void)
{
	int there[2], back[2];
	CHECK(pipe(there) == 0 && pipe(back) == 0);
	close(make("f", O_RDONLY));
	pid_t child = fork();
	if (child == 0) {
		close(there[1]);
		close(back[0]);
		turn_taker(there[0], back[1], 1);
		exit(0);
	}
	close(there[0]);
	close(back[1]);
	turn_taker(back[0], there[1], 0);
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* ---- deferred writes are invisible ---- */

/* A file as a process without hooks finds it: by path, in the kernel. */
static long raw_read(const char *name, void *buf, size_t len)
{
	long fd = raw(SYS_open, (long)name, O_RDONLY | O_NONBLOCK, 0, 0);
	CHECK(fd >= 0);
	long n = raw(SYS_read, fd, (long)buf, len, 0);
	raw(SYS_close, fd, 0, 0, 0);
	return n;
}

static void wrote(int fd, int value, off_t at)
{
	unsigned char page[PAGE];
	memset(page, value, PAGE);
	CHECK(pwrite(fd, page, PAGE, at) == PAGE);
}

static void unnoticed_stat(void)
{
	struct stat st, other;
	struct statx stx;
	unlink("s");
	int fd = open("s", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	for (int i = 0; i < 20; i++) {
		struct timespec before, pause = {0, 3000000};
		/* File times have the resolution of a clock tick. */
		clock_gettime(CLOCK_REALTIME_COARSE, &before);
		nanosleep(&pause, NULL);
		wrote(fd, i, (off_t)i * PAGE);
		off_t size = (off_t)(i + 1) * PAGE;
		switch (i % 4) {
		case 0: CHECK(fstat(fd, &st) == 0); break;
		case 1: CHECK(stat("s", &st) == 0); break;
		case 2: CHECK(fstatat(AT_FDCWD, "s", &st, AT_SYMLINK_NOFOLLOW) == 0); break;
		case 3:
			CHECK(statx(AT_FDCWD, "s", 0, STATX_ALL, &stx) == 0);
			CHECK(stx.stx_size == size);
			CHECK(syscall(SYS_fstat, fd, &st) == 0);
		}
		CHECK(st.st_size == size);
		CHECK(st.st_mtim.tv_sec > before.tv_sec || st.st_mtim.tv_nsec >= before.tv_nsec);
		/* No other write follows it. */
		nanosleep(&pause, NULL);
		CHECK(stat("s", &other) == 0 && other.st_mtim.tv_nsec == st.st_mtim.tv_nsec);
	}
	CHECK(lseek(fd, 0, SEEK_END) == 20 * PAGE && lseek(fd, -PAGE, SEEK_END) == 19 * PAGE);
	wrote(fd, 9, 30 * PAGE);
	CHECK(lseek(fd, 0, SEEK_END) == 31 * PAGE && lseek(fd, 30 * PAGE, SEEK_DATA) == 30 * PAGE);
	/* Closing changes no time, either, if there was no write since. */
	CHECK(fstat(fd, &st) == 0 && usleep(20000) == 0 && close(fd) == 0 && stat("s", &other) == 0);
	CHECK(other.st_mtim.tv_nsec == st.st_mtim.tv_nsec && other.st_ctim.tv_nsec == st.st_ctim.tv_nsec);
	/* The file system may take a block for the extents when it writes the pages. */
	CHECK(other.st_blocks >= st.st_blocks - 8 && other.st_blocks <= st.st_blocks + 8);
}

static void unnoticed_metadata(void)
{
	struct stat st;
	struct timespec old[2] = {{1000000, 0}, {2000000, 0}};
	unsigned char page[PAGE];
	int fd = open("m", O_RDWR | O_CREAT | O_TRUNC, 0644);
	for (int i = 0; i < 3; i++) {
		wrote(fd, i, 0);
		wrote(fd, i, 5 * PAGE);
		if (i == 0)
			CHECK(futimens(fd, old) == 0);
		else
			CHECK(utimensat(AT_FDCWD, "m", old, i == 1 ? 0 : AT_SYMLINK_NOFOLLOW) == 0);
		if (i == 2)
			CHECK(close(fd) == 0);
		CHECK(stat("m", &st) == 0 && st.st_mtim.tv_sec == 2000000);
	}
	/* A write clears these bits if the writer is not root. */
	fd = open("m", O_RDWR);
	wrote(fd, 7, 0);
	CHECK(fchmod(fd, 04755) == 0);
	close(fd);
	CHECK(stat("m", &st) == 0 && (st.st_mode & 07777) == 04755);
	/* After a rename over another file, all its bytes are there. */
	fd = open("new", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	wrote(fd, 8, 0);
	CHECK(rename("new", "m") == 0);
	CHECK(system("cmp -n 4096 m m && test $(stat -c %s m) = 4096") == 0);
	close(fd);
	CHECK(raw_read("m", page, PAGE) == PAGE && is_all(page, PAGE, 8));
}

static void unnoticed_looks(void)
{
	unsigned char page[PAGE];
	int pipes[2], fd = open("l", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(pipe(pipes) == 0);
	wrote(fd, 1, 0);
	off_t at = 0;
	CHECK(sendfile(pipes[1], fd, &at, PAGE) == PAGE && read(pipes[0], page, PAGE) == PAGE);
	CHECK(is_all(page, PAGE, 1));
	wrote(fd, 2, 0);
	at = 0;
	CHECK(splice(fd, &at, pipes[1], NULL, PAGE, 0) == PAGE && read(pipes[0], page, PAGE) == PAGE);
	CHECK(is_all(page, PAGE, 2));
	/* Changed in the kernel, between deferred writes. */
	wrote(fd, 3, 10 * PAGE);
	CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 10 * PAGE, 100) == 0);
	CHECK(pread(fd, page, PAGE, 10 * PAGE) == PAGE && is_all(page, 100, 0) && is_all(page + 100, PAGE - 100, 3));
	CHECK(posix_fallocate(fd, 0, 40 * PAGE) == 0);
	wrote(fd, 4, 40 * PAGE);
	CHECK(lseek(fd, 0, SEEK_END) == 41 * PAGE);
	/* Part of the memory is bad: the kernel writes the good part. */
	unsigned char *two = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(two, 5, 2 * PAGE);
	munmap(two + PAGE, PAGE);
	wrote(fd, 4, 20 * PAGE);
	wrote(fd, 4, 21 * PAGE);
	CHECK(pwrite(fd, two, 2 * PAGE, 20 * PAGE) == PAGE);
	CHECK(pread(fd, page, PAGE, 20 * PAGE) == PAGE && is_all(page, PAGE, 5));
	CHECK(pread(fd, page, PAGE, 21 * PAGE) == PAGE && is_all(page, PAGE, 4));
	/* A private mapping shows later writes to the file, as long as the process does not write to the mapping. */
	wrote(fd, 6, 0);
	unsigned char *map = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(map != MAP_FAILED && is_all(map, PAGE, 6));
	wrote(fd, 7, 0);
	CHECK(is_all(map, PAGE, 7));
	close(fd);
	/* Synced, and durable by a flag. */
	fd = open("d", O_RDWR | O_CREAT | O_TRUNC, 0644);
	wrote(fd, 1, 0);
	CHECK(fsync(fd) == 0 && raw(SYS_pread64, fd, (long)page, PAGE, 0) == PAGE && is_all(page, PAGE, 1));
	wrote(fd, 2, 0);
	CHECK(fdatasync(fd) == 0 && raw(SYS_pread64, fd, (long)page, PAGE, 0) == PAGE && is_all(page, PAGE, 2));
	memset(page, 3, PAGE);
	struct iovec one = {page, PAGE};
	CHECK(pwritev2(fd, &one, 1, 0, RWF_DSYNC) == PAGE);
	memset(page, 0, PAGE);
	CHECK(raw(SYS_pread64, fd, (long)page, PAGE, 0) == PAGE && is_all(page, PAGE, 3));
	wrote(fd, 4, 0);
	sync();
	CHECK(raw(SYS_pread64, fd, (long)page, PAGE, 0) == PAGE && is_all(page, PAGE, 4));
	/* A process that opens the new name reads all bytes. */
	wrote(fd, 5, 0);
	CHECK(system("test $(stat -c %s d) = 4096 && test $(tr -d '\\005' <d | wc -c) = 0") == 0);
	close(fd);
}

static void unnoticed_ends(void)
{
	unsigned char page[PAGE];
	char *arguments[] = {"./prog", "nothing", NULL};
	extern char **environ;
	/* A program file can be executed directly after it was written. */
	for (int i = 0; i < 50; i++) {
		int in = open("/proc/self/exe", O_RDONLY), out = open("prog", O_WRONLY | O_CREAT | O_TRUNC, 0755);
		ssize_t n;
		CHECK(in >= 0 && out >= 0);
		while ((n = read(in, page, PAGE)) > 0)
			CHECK(write(out, page, n) == n);
		close(in);
		if (i % 3 == 0)
			CHECK(close(out) == 0);
		else if (i % 3 == 1)
			CHECK(close_range(out, out, 0) == 0);
		else
			CHECK(dup2(0, out) == out && close(out) == 0);
		pid_t child;
		int status;
		CHECK(posix_spawn(&child, "./prog", NULL, NULL, arguments, environ) == 0);
		CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 2);
		unlink("prog");
	}
	/* For each way in which a process ends by itself, its bytes are in the file when wait returns. */
	for (int i = 0; i < 12; i++) {
		pid_t child = fork();
		if (child == 0) {
			int fd = open("e", O_RDWR | O_CREAT | O_TRUNC, 0644);
			wrote(fd, i + 1, 0);
			switch (i % 6) {
			case 0: exit(0);
			case 1: _exit(0);
			case 2: quick_exit(0);
			case 3: syscall(SYS_exit_group, 0);
			case 4: execl("/bin/true", "true", NULL);
			case 5:
				fcntl(fd, F_SETFD, FD_CLOEXEC);
				execv("/no/such/program", arguments);
				wrote(fd, i + 1, PAGE);
				execv("/bin/true", (char *[]){"true", NULL});
			}
		}
		int status;
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		CHECK(raw_read("e", page, PAGE) == PAGE && is_all(page, PAGE, i + 1));
	}
	/* A child of fork reads the bytes, and so does a process that opens the file again. */
	int fd = open("c", O_RDWR | O_CREAT | O_TRUNC, 0644);
	wrote(fd, 1, 0);
	pid_t child = fork();
	if (child == 0) {
		CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 1));
		wrote(fd, 2, 0);
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 2));
	close(fd);
	FILE *stream = fopen("c", "w");
	CHECK(stream && fputs("words", stream) >= 0 && fclose(stream) == 0);
	CHECK(raw_read("c", page, PAGE) == 5);
}

static void unnoticed(void)
{
	unnoticed_stat();
	unnoticed_metadata();
	unnoticed_looks();
	unnoticed_ends();
}

/* Only in mode back: the writes are deferred. */
static void waiting(void)
{
	struct stat st;
	unsigned char page[PAGE];
	int fd = open("w", O_RDWR | O_CREAT | O_TRUNC, 0644);
	wrote(fd, 1, 0);
	CHECK(raw(SYS_fstat, fd, (long)&st, 0, 0) == 0 && st.st_size == 0);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 1));
	CHECK(close(fd) == 0 && raw_read("w", page, PAGE) == PAGE && is_all(page, PAGE, 1));
}

/* ---- flags that are set for a moment on a shared description ---- */

static int undirected_fd;
static off_t undirected_size;
static volatile int undirected_over, undirected_rounds;

/* Keeps write-back busy, with pages, parts of pages and a tail. */
static void *undirected_writer(void *unused)
{
	unsigned char page[PAGE];
	for (int i = 0; !undirected_over; i++) {
		memset(page, 1 + i % 200, PAGE);
		off_t at = (off_t)(i * 7 % 64) * PAGE;
		CHECK(pwrite(undirected_fd, page, PAGE, at) == PAGE);
		CHECK(pwrite(undirected_fd, page, 100, at + 5 * PAGE + 17) == 100);
		CHECK(pwrite(undirected_fd, page, 333, undirected_size - 333) == 333);
		if (i % 2)
			CHECK(fdatasync(undirected_fd) == 0);
		undirected_rounds = i + 1;
	}
	return NULL;
}

static pthread_t undirected_begin(const char *name)
{
	unsigned char byte = 1;
	pthread_t thread;
	unlink(name);
	undirected_fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
	undirected_size = 80 * PAGE + 777;
	CHECK(undirected_fd >= 0 && pwrite(undirected_fd, &byte, 1, undirected_size - 1) == 1);
	undirected_over = undirected_rounds = 0;
	CHECK(pthread_create(&thread, NULL, undirected_writer, NULL) == 0);
	return thread;
}

static void undirected(void)
{
	static unsigned char some[3 * PAGE];
	int pipes[2], status;
	CHECK(pipe(pipes) == 0);
	pthread_t thread = undirected_begin("u");
	int fd = undirected_fd;
	for (int i = 0; i < 300; i++) {
		off_t at = (off_t)(i * 1237 % 200000);
		int wanted = i % 2 ? O_NONBLOCK : 0;
		CHECK((fcntl(fd, F_GETFL) & O_DIRECT) == 0);
		CHECK(fcntl(fd, F_SETFL, O_RDWR | wanted) == 0);
		CHECK((fcntl(fd, F_GETFL) & (O_DIRECT | O_NONBLOCK)) == wanted);
		CHECK(pread(fd, some, 1001, at + 3) == 1001);
		CHECK(sendfile(pipes[1], fd, &at, 1003) == 1003);
		CHECK(splice(fd, &at, pipes[1], NULL, 77, 0) == 77);
		CHECK(read(pipes[0], some, 1080) > 0);
		while (i % 10 == 9 && wanted) {
			CHECK(fcntl(pipes[0], F_SETFL, O_NONBLOCK) == 0);
			if (read(pipes[0], some, sizeof some) <= 0)
				break;
		}
	}
	/* On a busy machine the writer may start late; it must have written its tail once. */
	while (!undirected_rounds)
		usleep(100);
	undirected_over = 1;
	pthread_join(thread, NULL);
	/* The flag is cleared when write-back is idle. */
	CHECK(fsync(fd) == 0 && (raw(SYS_fcntl, fd, F_GETFL, 0, 0) & O_DIRECT) == 0);
	CHECK(raw(SYS_pread64, fd, (long)some, 333, undirected_size - 333) == 333);
	CHECK(is_all(some, 333, some[0]) && lseek(fd, 0, SEEK_END) == undirected_size);
	/* A child shares the description, and does not use the library. */
	for (int i = 0; i < 20; i++) {
		close(undirected_fd);
		thread = undirected_begin("v");
		usleep(i * 300);
		pid_t child = fork();
		if (child == 0) {
			for (int k = 0; k < 50; k++) {
				CHECK((raw(SYS_fcntl, undirected_fd, F_GETFL, 0, 0) & O_DIRECT) == 0);
				CHECK(raw(SYS_pread64, undirected_fd, (long)some, 1001, k * 4099 + 1) == 1001);
			}
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		undirected_over = 1;
		pthread_join(thread, NULL);
	}
	/* A long write, whose memory is bad from some page on: the bytes before that page count. */
	size_t len = 4 << 20, bad = 12 * 1024;
	unsigned char *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	memset(memory, 6, len);
	munmap(memory + len - bad, bad);
	fd = open("x", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(pwrite(fd, memory, len, 0) == (ssize_t)(len - bad));
	CHECK(lseek(fd, 0, SEEK_END) == (off_t)(len - bad));
	CHECK(pread(fd, some, PAGE, len - bad - PAGE) == PAGE && is_all(some, PAGE, 6));
	close(fd);
	/* The program's own flag stays set. */
	CHECK(fcntl(fd = open("w", O_RDWR | O_CREAT, 0644), F_SETFL, O_DIRECT) == 0);
	CHECK(fcntl(fd, F_GETFL) & O_DIRECT);
}

/* In a directory on a file system of four megabytes. */
static void full(void)
{
	static char block[1 << 20];
	int fd = open("small/f", O_RDWR | O_CREAT | O_TRUNC, 0644), failed = 0;
	CHECK(fd >= 0);
	for (int i = 0; i < 6 && !failed; i++)
		failed = write(fd, block, sizeof block) != sizeof block;
	int at_sync = fsync(fd) != 0 && errno == ENOSPC;
	int at_close = close(fd) != 0 && errno == ENOSPC;
	CHECK(failed || (at_sync && at_close));
	fd = open("small/g", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (fd >= 0) {
		failed = write(fd, block, sizeof block) != sizeof block;
		CHECK((close(fd) != 0 && errno == ENOSPC) || failed);
	}
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} all[] = {
		{"close_race", close_race}, {"shared_offset", shared_offset}, {"append", append},
		{"faults", faults}, {"signals", signals}, {"forks", forks}, {"fork_race", fork_race},
		{"other_process", other_process}, {"sent", sent}, {"locks", locks},
		{"under_foot", under_foot}, {"many_files", many_files},
		{"many_numbers", many_numbers},
		{"take_turns", take_turns}, {"unnoticed", unnoticed}, {"waiting", waiting},
		{"undirected", undirected},
		{"full", full},
	};
	for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
		if (count > 1 && strcmp(arguments[1], all[i].name) == 0) {
			all[i].run();
			return 0;
		}
	return 2;
}
