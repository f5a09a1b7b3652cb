/* One file, open several times in one process, for reading and for writing. One scenario each, by name. Prints
   nothing and returns 0 if all results are the kernel's. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/fsuid.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <grp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { WRITERS = 4, READERS = 4, OPENS = 6 };

/* ---- stamps: a reader gets the last stamp that was written before its read, or a later one ---- */

static _Atomic uint64_t begun[PAGES], done[PAGES];
static int stamps_checked_whole;

static void put_stamp(int fd, int page, uint64_t stamp)
{
	uint64_t words[PAGE / 8];
	for (int i = 0; i < PAGE / 8; i++)
		words[i] = stamp;
	begun[page] = stamp;
	CHECK(pwrite(fd, words, PAGE, (off_t)page * PAGE) == PAGE);
	done[page] = stamp;
}

static void check_stamp(int fd, int page)
{
	uint64_t words[PAGE / 8], least = done[page];
	CHECK(pread(fd, words, PAGE, (off_t)page * PAGE) == PAGE);
	uint64_t most = begun[page];
	for (int i = 0; i < PAGE / 8; i++) {
		/* The kernel's reads may be torn. */
		CHECK(words[i] >= least && words[i] <= most);
		CHECK(!stamps_checked_whole || words[i] == words[0]);
	}
}

static void *write_stamps(void *argument)
{
	int own = (long)argument, fd = open("f", own % 2 ? O_RDWR : O_WRONLY);
	CHECK(fd >= 0);
	for (uint64_t i = 1; i <= 4000; i++)
		put_stamp(fd, own + WRITERS * (i * 7 % (PAGES / WRITERS)), done[own] + i);
	CHECK(close(fd) == 0);
	return NULL;
}

static void *read_stamps(void *argument)
{
	int fd = open("f", O_RDONLY);
	CHECK(fd >= 0);
	for (int i = 0; i < 6000; i++)
		check_stamp(fd, (i * 11 + (long)argument * 29) % PAGES);
	CHECK(close(fd) == 0);
	return NULL;
}

static void check_by_others(void)
{
	char command[64];
	uint64_t stamp;
	FILE *pipe;
	/* By another process, without the library. */
	snprintf(command, sizeof command, "env -u LD_PRELOAD cat f");
	CHECK((pipe = popen(command, "r")) != NULL);
	for (int i = 0; i < PAGES * (PAGE / 8); i++)
		CHECK(fread(&stamp, 8, 1, pipe) == 1 && stamp == done[i / (PAGE / 8)]);
	CHECK(pclose(pipe) == 0);
}

static void stamps(void)
{
	pthread_t threads[WRITERS + READERS];
	int fd = open("f", O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0);
	for (int i = 0; i < PAGES; i++)
		put_stamp(fd, i, 1);
	for (long i = 0; i < WRITERS + READERS; i++)
		CHECK(pthread_create(&threads[i], NULL, i < WRITERS ? write_stamps : read_stamps, (void *)i) == 0);
	for (int i = 0; i < WRITERS + READERS; i++)
		pthread_join(threads[i], NULL);
	check_by_others();
	for (int i = 0; i < PAGES; i++)
		check_stamp(fd, i);
	CHECK(close(fd) == 0);
}

/* ---- whole: all descriptors are open before the first is used; reads of a served file are not torn ---- */

static int ends[WRITERS + READERS];

static void *use_end(void *argument)
{
	long own = (long)argument;
	for (uint64_t i = 1; i <= 6000; i++)
		if (own < WRITERS)
			put_stamp(ends[own], own + WRITERS * (i * 7 % (PAGES / WRITERS)), 1 + i);
		else
			check_stamp(ends[own], (i * 11 + own * 29) % PAGES);
	return NULL;
}

static void whole(int is_served)
{
	pthread_t threads[WRITERS + READERS];
	for (int i = 0; i < WRITERS + READERS; i++)
		CHECK((ends[i] = open("f", i < WRITERS ? O_RDWR | O_CREAT : O_RDONLY, 0644)) >= 0);
	for (int i = 0; i < PAGES; i++)
		put_stamp(ends[0], i, 1);
	for (int i = 0; i < 2000; i++)
		check_stamp(ends[WRITERS], i % PAGES);
	stamps_checked_whole = is_served;
	for (long i = 0; i < WRITERS + READERS; i++)
		CHECK(pthread_create(&threads[i], NULL, use_end, (void *)i) == 0);
	for (int i = 0; i < WRITERS + READERS; i++)
		pthread_join(threads[i], NULL);
	check_by_others();
	/* Closes the writers first: the remaining readers continue to read. */
	for (int i = 0; i < WRITERS + READERS; i++) {
		CHECK(close(ends[i]) == 0);
		for (int j = 0; j < PAGES && i + 1 < WRITERS + READERS; j++)
			check_stamp(ends[WRITERS + READERS - 1], j);
	}
}

/* ---- model: random operations, by any of several descriptors, against the rules of POSIX ---- */

static uint32_t state;

static uint32_t pick(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 17;
	state ^= state << 5;
	return state % below;
}

enum { MODEL_BYTES = 96 * 1024 };

struct description {
	int users, flags;
	off_t offset;
};
struct end {
	int fd;
	struct description *of;
};

static unsigned char model[2 * MODEL_BYTES];
static off_t model_len;
static struct end all[OPENS];

static int may_read(struct description *of)
{
	return (of->flags & O_ACCMODE) != O_WRONLY;
}

static int may_write(struct description *of)
{
	return (of->flags & O_ACCMODE) != O_RDONLY;
}

static void open_end(struct end *end)
{
	static const int flags[] = {O_RDONLY, O_WRONLY, O_RDWR, O_RDWR, O_RDWR | O_APPEND, O_WRONLY | O_APPEND,
				    O_RDONLY | O_NONBLOCK};
	end->of = calloc(1, sizeof *end->of);
	end->of->flags = flags[pick(7)];
	end->of->users = 1;
	end->fd = open("m", end->of->flags | (pick(2) ? O_CLOEXEC : 0));
	CHECK(end->fd >= 0);
}

static void close_end(struct end *end)
{
	CHECK(close(end->fd) == 0);
	if (--end->of->users == 0)
		free(end->of);
	end->of = NULL;
}

static void model_read(struct end *end, off_t at, size_t n, int is_at)
{
	unsigned char found[9000];
	ssize_t wanted = at >= model_len ? 0 : n < (size_t)(model_len - at) ? (ssize_t)n : model_len - at;
	ssize_t got = is_at ? pread(end->fd, found, n, at) : read(end->fd, found, n);
	if (!may_read(end->of)) {
		CHECK(got == -1 && errno == EBADF);
		return;
	}
	CHECK(got == wanted && memcmp(found, model + at, got) == 0);
	if (!is_at)
		end->of->offset += got;
}

static void model_write(struct end *end, off_t at, size_t n, int is_at)
{
	static unsigned char value;
	unsigned char bytes[9000];
	memset(bytes, ++value, n);
	int is_appended = end->of->flags & O_APPEND;
	if (!is_appended && at + n > MODEL_BYTES)
		return;
	if (is_appended && model_len + n > MODEL_BYTES)
		return;
	ssize_t got = is_at ? pwrite(end->fd, bytes, n, at) : write(end->fd, bytes, n);
	if (!may_write(end->of)) {
		CHECK(got == -1 && errno == EBADF);
		return;
	}
	CHECK(got == (ssize_t)n);
	if (n == 0)
		return;
	if (is_appended)
		at = model_len;
	memcpy(model + at, bytes, n);
	if (at + (off_t)n > model_len)
		model_len = at + n;
	if (!is_at)
		end->of->offset = at + n;
}

static void model_seek(struct end *end)
{
	int whence = pick(3);
	off_t by = (off_t)pick(20000) - 8000;
	off_t wanted = by + (whence == SEEK_CUR ? end->of->offset : whence == SEEK_END ? model_len : 0);
	off_t got = lseek(end->fd, by, whence);
	if (wanted < 0) {
		CHECK(got == -1 && errno == EINVAL);
		return;
	}
	CHECK(got == wanted);
	end->of->offset = wanted;
}

static void model_map(struct end *end)
{
	if (model_len < PAGE)
		return;
	int is_shared = pick(2);
	int prot = PROT_READ | (is_shared && pick(2) ? PROT_WRITE : 0);
	unsigned char *memory = mmap(NULL, PAGE, prot, is_shared ? MAP_SHARED : MAP_PRIVATE, end->fd, 0);
	if (!may_read(end->of) || (prot & PROT_WRITE && !may_write(end->of))) {
		CHECK(memory == MAP_FAILED && errno == EACCES);
		return;
	}
	CHECK(memory != MAP_FAILED && memcmp(memory, model, PAGE) == 0);
	if (prot & PROT_WRITE) {
		memory[5] = 77;
		model[5] = 77;
	}
	CHECK(munmap(memory, PAGE) == 0);
}

static void model_lock(struct end *end)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	if (pick(2)) {
		int got = fcntl(end->fd, F_SETLK, &lock);
		CHECK(may_write(end->of) ? got == 0 : got == -1 && errno == EBADF);
		return;
	}
	/* Another description's lock conflicts, this description's own does not. */
	CHECK(flock(end->fd, LOCK_EX | LOCK_NB) == 0);
	for (int i = 0; i < OPENS; i++)
		if (all[i].of && all[i].of != end->of)
			CHECK(flock(all[i].fd, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
	CHECK(flock(end->fd, LOCK_UN) == 0);
}

static void model_status(struct end *end)
{
	int kept = O_ACCMODE | O_APPEND | O_NONBLOCK;
	CHECK((fcntl(end->fd, F_GETFL) & kept) == end->of->flags);
	if (pick(8) == 0) {
		end->of->flags ^= pick(2) ? O_APPEND : O_NONBLOCK;
		CHECK(fcntl(end->fd, F_SETFL, end->of->flags) == 0);
		CHECK((fcntl(end->fd, F_GETFL) & kept) == end->of->flags);
	}
	int flag = pick(2);
	CHECK(fcntl(end->fd, F_SETFD, flag) == 0 && fcntl(end->fd, F_GETFD) == flag);
	struct stat found;
	CHECK(fstat(end->fd, &found) == 0 && found.st_size == model_len);
	struct pollfd asked = {.fd = end->fd, .events = POLLIN};
	CHECK(poll(&asked, 1, 0) == 1 && asked.revents == POLLIN);
}

static void model_truncate(struct end *end)
{
	off_t len = pick(MODEL_BYTES);
	int got = ftruncate(end->fd, len);
	if (!may_write(end->of)) {
		CHECK(got == -1 && (errno == EINVAL || errno == EBADF));
		return;
	}
	CHECK(got == 0);
	if (len < model_len)
		memset(model + len, 0, model_len - len);
	model_len = len;
}

static void model_reserve(struct end *end)
{
	int got = fallocate(end->fd, 0, 0, PAGE);
	if (!may_write(end->of)) {
		CHECK(got == -1 && errno == EBADF);
		CHECK(posix_fallocate(end->fd, 0, PAGE) == EBADF);
		return;
	}
	CHECK(got == 0);
	if (model_len < PAGE)
		model_len = PAGE;
}

/* A child continues to read at the offset that it shares, itself or as another program. */
static void model_fork(struct end *end)
{
	int status, fd = end->fd;
	if (!may_read(end->of))
		return;
	int is_other = pick(2);
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		if (is_other) {
			dup2(fd, 0);
			execlp("dd", "dd", "bs=100", "count=1", "of=/dev/null", "status=none", NULL);
			_exit(1);
		}
		char part[100];
		CHECK(read(fd, part, 100) >= 0);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	off_t left = model_len - end->of->offset;
	end->of->offset += left < 0 ? 0 : left < 100 ? left : 100;
}

static void model_other(void)
{
	char command[128];
	unsigned at = pick(4000), value = pick(10);
	if (model_len < 4000)
		return;
	snprintf(command, sizeof command, "printf %u | env -u LD_PRELOAD dd of=m bs=1 seek=%u conv=notrunc status=none",
		 value, at);
	CHECK(system(command) == 0);
	model[at] = '0' + value;
}

static void model_all(int seed, int steps, int kinds)
{
	state = seed * 2654435761u + 1;
	memset(model, 0, sizeof model);
	int made = open("m", O_CREAT | O_TRUNC | O_RDWR, 0644);
	CHECK(made >= 0);
	for (int i = 0; i < MODEL_BYTES / 2; i++)
		model[i] = i * 7;
	model_len = MODEL_BYTES / 2;
	CHECK(write(made, model, model_len) == model_len && close(made) == 0);
	for (int i = 0; i < OPENS - 2; i++)
		open_end(&all[i]);
	for (int i = 0; i < steps; i++) {
		struct end *end = &all[pick(OPENS)];
		if (!end->of) {
			if (pick(60) == 0)
				open_end(end);
			continue;
		}
		int is_at = pick(2), n = pick(20) ? pick(8) ? pick(300) : pick(9000) : 0;
		off_t at = is_at ? pick(MODEL_BYTES / 2) : end->of->offset;
		uint32_t what = pick(kinds);
		if (what < 300)
			model_read(end, at, n, is_at);
		else if (what < 350)
			model_write(end, at, n, is_at);
		else if (what < 390)
			model_seek(end);
		else if (what < 394)
			model_truncate(end);
		else if (what < 400)
			model_reserve(end);
		else if (what < 403)
			model_status(end);
		else if (what < 404)
			close_end(end);
		else if (what < 405) {
			struct end *new = &all[pick(OPENS)];
			if (!new->of && (new->fd = dup(end->fd)) >= 0) {
				new->of = end->of;
				new->of->users++;
			}
		} else if (what < 406)
			model_lock(end);
		else if (what < 407)
			model_map(end);
		else if (what < 408)
			model_fork(end);
		else
			model_other();
	}
	for (int i = 0; i < OPENS; i++)
		if (all[i].of)
			close_end(&all[i]);
	static unsigned char found[2 * MODEL_BYTES];
	int fd = open("m", O_RDONLY);
	CHECK(read(fd, found, sizeof found) == model_len && memcmp(found, model, model_len) == 0);
	CHECK(close(fd) == 0);
}

static void model_many(int first)
{
	/* With all kinds of disturbance, with few kinds, and with none. */
	for (int seed = first; seed < first + scaled(2, 1); seed++) {
		model_all(seed, 3000, 409);
		model_all(seed, 20000, 407);
		model_all(seed, 10000, 404);
		model_all(seed, 10000, 400);
	}
}

/* ---- limit: the file is handed over while no number is free to open it again ---- */

static void limit(void)
{
	char page[PAGE], read_by_others[PAGE];
	make_pages("f", 0);
	int to[2], from[2];
	char go = 'g';
	CHECK(pipe(to) == 0 && pipe(from) == 0);
	/* The helper waits for a message, without hooks and with none of this process's files open. */
	FILE *other = NULL;
	char command[200];
	snprintf(command, sizeof command,
		 "env -u LD_PRELOAD sh -c 'read word <&%d; printf 01234567 | dd of=f bs=8 seek=1 conv=notrunc status=none; "
		 "echo >&%d'",
		 to[0], from[1]);
	CHECK((other = popen(command, "w")) != NULL);
	int writer = open("f", O_RDWR), reader = open("f", O_RDONLY), log = open("f", O_WRONLY | O_APPEND);
	CHECK(writer >= 0 && reader >= 0 && log >= 0);
	CHECK(lseek(reader, 5 * PAGE, SEEK_SET) == 5 * PAGE);
	for (int i = 0; i < 20000; i++)
		CHECK(pread(reader, page, PAGE, (i % PAGES) * PAGE) == PAGE && is_all(page, PAGE, i % PAGES));
	int numbers[256], count = 0;
	struct rlimit most = {200, 200};
	CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
	while (count < 256 && (numbers[count] = dup(1)) >= 0)
		count++;
	CHECK(count < 256);
	CHECK(write(to[1], "go\n", 3) == 3 && read(from[0], &go, 1) == 1);
	CHECK(pread(reader, page, PAGE, 0) == PAGE && memcmp(page + 8, "01234567", 8) == 0);
	CHECK(read(reader, page, 100) == 100 && is_all(page, 100, 5));
	CHECK(lseek(reader, 0, SEEK_CUR) == 5 * PAGE + 100);
	CHECK(write(reader, page, 1) == -1 && errno == EBADF);
	CHECK(read(log, page, 1) == -1 && errno == EBADF);
	memset(page, 99, PAGE);
	CHECK(write(log, page, 10) == 10 && pwrite(writer, page, 10, PAGE) == 10);
	CHECK(lseek(reader, 0, SEEK_END) == PAGES * PAGE + 10);
	CHECK(pread(reader, read_by_others, 10, PAGES * PAGE) == 10 && memcmp(page, read_by_others, 10) == 0);
	CHECK(pread(reader, read_by_others, 10, PAGE) == 10 && memcmp(page, read_by_others, 10) == 0);
	CHECK((fcntl(log, F_GETFL) & (O_ACCMODE | O_APPEND)) == (O_WRONLY | O_APPEND));
	while (count > 0)
		close(numbers[--count]);
	CHECK(close(writer) == 0 && close(reader) == 0 && close(log) == 0);
	CHECK(pclose(other) == 0);
}

/* ---- further: the file is opened repeatedly beside a served descriptor ---- */

/* For this thread only, and without hooks. */
static long set_user(long user)
{
	long result;
#ifdef __x86_64__
	__asm__ volatile("syscall" : "=a"(result) : "a"(SYS_setresuid), "D"(-1), "S"(user), "d"(-1) : "rcx", "r11", "memory");
#else
	result = seteuid(user);
#endif
	return result;
}

static void further(void)
{
	static const int flags[] = {O_RDONLY, O_RDWR, O_WRONLY | O_APPEND, O_RDWR | O_CREAT, O_RDONLY | O_NONBLOCK};
	char page[PAGE];
	make_pages("f", 0);
	CHECK(symlink("f", "link") == 0);
	int fd = open("f", O_RDWR);
	CHECK(fd >= 0);
	for (int i = 0; i < 3000; i++)
		CHECK(pread(fd, page, PAGE, (i % PAGES) * PAGE) == PAGE && is_all(page, PAGE, i % PAGES));
	CHECK(lseek(fd, 3 * PAGE, SEEK_SET) == 3 * PAGE);
	off_t len = PAGES * PAGE;
	for (int i = 0; i < 500; i++) {
		int mode = flags[i % 5], other = open(i % 2 ? "f" : "link", mode | (i % 3 ? O_CLOEXEC : 0), 0600);
		CHECK(other == fd + 1 && fcntl(other, F_GETFD) == (i % 3 ? FD_CLOEXEC : 0));
		CHECK((fcntl(other, F_GETFL) & (O_ACCMODE | O_APPEND | O_NONBLOCK)) == (mode & ~O_CREAT));
		if ((mode & O_ACCMODE) != O_WRONLY)
			CHECK(read(other, page, PAGE) == PAGE && lseek(other, 0, SEEK_CUR) == PAGE);
		else
			CHECK(read(other, page, PAGE) == -1 && errno == EBADF);
		memset(page, i, PAGE);
		ssize_t written = write(other, page, 100);
		if ((mode & O_ACCMODE) == O_RDONLY) {
			CHECK(written == -1 && errno == EBADF);
		} else {
			off_t at = mode & O_APPEND ? len : PAGE;
			CHECK(written == 100 && pread(fd, page, 100, at) == 100 && is_all(page, 100, i));
			len += mode & O_APPEND ? 100 : 0;
		}
		CHECK(lseek(fd, 0, SEEK_CUR) == 3 * PAGE && lseek(fd, 0, SEEK_END) == len);
		CHECK(lseek(fd, 3 * PAGE, SEEK_SET) == 3 * PAGE && close(other) == 0);
		for (int j = 0; j < 20; j++)
			CHECK(pread(fd, page, PAGE, 5 * PAGE) == PAGE && is_all(page, PAGE, 5));
	}
	/* Opens that only the kernel may decide. */
	CHECK(open("f", O_RDWR | O_CREAT | O_EXCL, 0600) == -1 && errno == EEXIST);
	CHECK(open("link", O_RDWR | O_NOFOLLOW) == -1 && errno == ELOOP);
	CHECK(open("f/", O_RDWR) == -1 && errno == ENOTDIR);
	CHECK(open("f", O_RDONLY | O_DIRECTORY) == -1 && errno == ENOTDIR);
	CHECK(chmod("f", 0400) == 0);
	if (getuid() == 0) {
		CHECK(chmod(".", 0755) == 0 && set_user(65534) == 0);
		CHECK(open("f", O_RDONLY) == -1 && errno == EACCES);
		CHECK(open("f", O_RDWR) == -1 && errno == EACCES && set_user(0) == 0);
	} else {
		CHECK(open("f", O_RDWR) == -1 && errno == EACCES);
	}
	int cut = open("f", O_RDONLY | O_TRUNC);
	CHECK(getuid() == 0 ? cut >= 0 : errno == EACCES);
	CHECK(pread(fd, page, PAGE, 0) == (cut >= 0 ? 0 : PAGE));
}

/* ---- rights: a file that may no longer be opened stays open ---- */

static void share(int *fds)
{
	char page[PAGE];
	CHECK((fds[0] = open("f", O_RDWR)) >= 0 && (fds[1] = open("f", O_RDONLY)) >= 0);
	for (int i = 0; i < 3000; i++)
		CHECK(pread(fds[1], page, PAGE, (i % PAGES) * PAGE) == PAGE && is_all(page, PAGE, i % PAGES));
	CHECK(lseek(fds[1], 7 * PAGE, SEEK_SET) == 7 * PAGE && lseek(fds[0], 9 * PAGE, SEEK_SET) == 9 * PAGE);
}

static void check_shared(int *fds)
{
	char page[PAGE];
	CHECK(read(fds[1], page, PAGE) == PAGE && is_all(page, PAGE, 7));
	CHECK(read(fds[0], page, PAGE) == PAGE && is_all(page, PAGE, 9));
	CHECK(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[1], 0) == MAP_FAILED && errno == EACCES);
	pid_t child = fork();
	if (child == 0) {
		CHECK(read(fds[1], page, PAGE) == PAGE && is_all(page, PAGE, 8));
		CHECK(read(fds[0], page, PAGE) == PAGE && is_all(page, PAGE, 10));
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(lseek(fds[1], 0, SEEK_CUR) == 9 * PAGE && close(fds[0]) == 0 && close(fds[1]) == 0);
}

static void rights(void)
{
	int fds[2];
	gid_t groups[64];
	make_pages("f", 0);
	CHECK(chmod("f", 0600) == 0);
	/* None of these changes the file. */
	int count = getgroups(64, groups);
	uid_t user = getuid();
	gid_t group = getgid();
	for (int i = 0; i < 2; i++) {
		CHECK(setuid(user) == 0 && setgid(group) == 0 && setegid(group) == 0 && seteuid(user) == 0);
		CHECK(setreuid(user, -1) == 0 && setregid(group, -1) == 0);
		CHECK(setresuid(user, -1, -1) == 0 && setresgid(group, -1, -1) == 0);
		setfsuid(-1), setfsgid(-1);
		CHECK((setgroups(count, groups) == 0) == (user == 0));
		CHECK((initgroups("root", group) == 0) == (user == 0) && (setgroups(count, groups) == 0) == (user == 0));
		CHECK(syscall(SYS_capset, NULL, NULL) == -1 && errno == EFAULT);
		CHECK(syscall(SYS_setuid, user) == 0 && syscall(SYS_setgid, group) == 0);
		CHECK(syscall(SYS_setreuid, -1, -1) == 0 && syscall(SYS_setregid, -1, -1) == 0);
		CHECK(syscall(SYS_setresuid, -1, -1, -1) == 0 && syscall(SYS_setresgid, -1, -1, -1) == 0);
		syscall(SYS_setfsuid, -1), syscall(SYS_setfsgid, -1);
		CHECK((syscall(SYS_setgroups, count, groups) == 0) == (user == 0));
		share(fds);
	}
	if (user == 0)
		CHECK(chown("f", 65534, -1) == 0 && seteuid(65534) == 0);
	check_shared(fds);
	/* The file could not be opened again then; in each of three ways. */
	for (int i = 0; i < 3; i++) {
		CHECK(chmod("f", 0600) == 0);
		share(fds);
		CHECK((i == 0 ? chmod("f", 0) : i == 1 ? fchmod(fds[1], 0) : fchmodat(AT_FDCWD, "f", 0, 0)) == 0);
		CHECK(flock(fds[0], LOCK_EX | LOCK_NB) == 0);
		CHECK(flock(fds[1], LOCK_SH | LOCK_NB) == -1 && errno == EWOULDBLOCK && flock(fds[0], LOCK_UN) == 0);
		check_shared(fds);
	}
	CHECK(chmod("f", 0600) == 0);
	/* After a lock by fcntl the numbers are free that the library used to separate the descriptors. */
	struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
	share(fds);
	CHECK(fcntl(fds[0], F_SETLK, &lock) == 0);
	for (int i = 1; i < 5; i++)
		CHECK(dup2(1, fds[1] + i) == fds[1] + i && close(fds[1] + i) == 0);
	/* As long as the lock is held, the library can't give the descriptors separate descriptions. So a child
	   gets the right bytes and offset, or EBADF. */
	char page[PAGE];
	pid_t child = fork();
	if (child == 0) {
		struct stat one, other;
		for (int i = 0; i < 2; i++) {
			ssize_t count = pread(fds[i], page, PAGE, 3 * PAGE);
			CHECK(count == -1 ? errno == EBADF : count == PAGE && is_all(page, PAGE, 3));
			off_t offset = lseek(fds[i], 0, SEEK_CUR);
			CHECK(offset == -1 ? errno == EBADF : offset == (i ? 7 : 9) * PAGE);
			CHECK(i == 0 || (write(fds[i], page, 1) == -1 && errno == EBADF));
			CHECK(fcntl(fds[i], F_GETFD) == 0 && fstat(fds[i], &one) == 0 && stat("f", &other) == 0 && one.st_ino == other.st_ino);
			CHECK(dup2(1, fds[i]) == fds[i] && close(fds[i]) == 0);
		}
		_exit(0);
	}
	int status;
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(fcntl(fds[0], F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
	CHECK(read(fds[1], page, PAGE) == PAGE && is_all(page, PAGE, 7));
	CHECK(read(fds[0], page, PAGE) == PAGE && is_all(page, PAGE, 9));
	lock.l_type = F_UNLCK;
	CHECK(fcntl(fds[0], F_SETLK, &lock) == 0);
	child = fork();
	if (child == 0) {
		CHECK(read(fds[1], page, PAGE) == PAGE && is_all(page, PAGE, 8));
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(lseek(fds[1], 0, SEEK_CUR) == 9 * PAGE && close(fds[0]) == 0 && close(fds[1]) == 0);
	/* A process can neither enter nor leave another view of the file system. */
	CHECK(chroot(NULL) == -1 && syscall(SYS_chroot, NULL) == -1);
	CHECK(setns(-1, 0) == -1 && errno == EBADF && syscall(SYS_setns, -1, 0) == -1);
}

/* ---- killed: reports its writes to the process that kills it ---- */

static void killed(void)
{
	uint64_t words[PAGE / 8];
	int fds[2] = {open("f", O_RDWR | O_CREAT, 0644), open("f", O_RDWR)};
	CHECK(fds[0] >= 0 && fds[1] >= 0 && ftruncate(fds[0], PAGES * PAGE) == 0);
	for (uint64_t i = 1;; i++) {
		int page = i % PAGES;
		for (int j = 0; j < PAGE / 8; j++)
			words[j] = i;
		CHECK(pwrite(fds[i / PAGES % 2], words, PAGE, (off_t)page * PAGE) == PAGE);
		for (int j = 0; j < 4; j++)
			CHECK(pread(fds[j % 2], words, PAGE, (off_t)page * PAGE) == PAGE && words[9] == i);
		CHECK(write(1, &i, sizeof i) == sizeof i);
	}
}

int main(int count, char **arguments)
{
	const char *name = count > 1 ? arguments[1] : "";
	int argument = count > 2 ? atoi(arguments[2]) : 1;
	if (!strcmp(name, "stamps"))
		stamps();
	else if (!strcmp(name, "whole"))
		whole(argument);
	else if (!strcmp(name, "model"))
		model_many(argument);
	else if (!strcmp(name, "limit"))
		limit();
	else if (!strcmp(name, "further"))
		further();
	else if (!strcmp(name, "rights"))
		rights();
	else if (!strcmp(name, "killed"))
		killed();
	else
		return 2;
	return 0;
}
