/* A tree of processes that open files, share them by forks, use them, and leave them in all ways that there are,
   at random. They take turns, and know from a model what each call has to find: the bytes of the files and the
   offset of each description. `forked_tree SEED MODEL_FILE`. Prints nothing and returns 0 where all is as the
   kernel has it. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

enum { FILES = 40, FILE_MAX = 16 * PAGE, DESCRIPTIONS = 65536, NUMBERS = 6, PROCESSES = 4, TURN = 300 };

struct model {
	int is_failed, processes, turns_left, descriptions;
	struct {
		long size;
		unsigned char bytes[FILE_MAX];
	} files[FILES];
	struct {
		int file, flags;
		long offset;
	} of[DESCRIPTIONS];
	/* Who may be killed. */
	pid_t pids[PROCESSES];
};

static struct model *model;
/* This process's: number of the descriptor, and which description it is of. */
static struct {
	int fd, description;
} own[NUMBERS];
static int owned;
static uint64_t state;
static char *self, *model_path;
extern char **environ;

static unsigned any(unsigned below)
{
	/* SplitMix64. */
	uint64_t word = state += 0x9e3779b97f4a7c15;
	word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
	word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
	return (word ^ (word >> 31)) % below;
}

#undef CHECK
#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			if (!model || !__atomic_exchange_n(&model->is_failed, 1, __ATOMIC_SEQ_CST)) \
				fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno); \
			_exit(1); \
		} \
	} while (0)

static const char *name(int file)
{
	static char name[8];
	snprintf(name, sizeof name, "%d", file);
	return name;
}

static int access_of(int index)
{
	return model->of[own[index].description].flags & O_ACCMODE;
}

static long *offset_of(int index)
{
	return &model->of[own[index].description].offset;
}

static int file_of(int index)
{
	return model->of[own[index].description].file;
}

static void open_one(void)
{
	static const int kinds[] = {O_RDONLY, O_RDWR, O_RDWR, O_WRONLY, O_RDWR | O_APPEND};
	if (owned == NUMBERS || model->descriptions == DESCRIPTIONS)
		return;
	int file = any(FILES), flags = kinds[any(5)];
	int fd = open(name(file), flags | (any(2) ? O_CLOEXEC : 0));
	CHECK(fd >= 0);
	int description = model->descriptions++;
	model->of[description].file = file;
	model->of[description].flags = flags;
	model->of[description].offset = 0;
	own[owned].fd = fd;
	own[owned++].description = description;
}

/* Read or write so many bytes there, or at the offset. */
static void transfer(int index, int writes, int moves)
{
	static unsigned char buffer[2 * PAGE];
	int fd = own[index].fd, file = file_of(index);
	unsigned char *bytes = model->files[file].bytes;
	long *size = &model->files[file].size, at = moves ? *offset_of(index) : any(FILE_MAX);
	long len = 1 + any(any(3) ? 300 : 2 * PAGE);
	if (writes) {
		if (access_of(index) == O_RDONLY)
			return;
		if (model->of[own[index].description].flags & O_APPEND)
			at = *size;
		if (at + len > FILE_MAX)
			len = FILE_MAX - at;
		if (len <= 0)
			return;
		memset(buffer, any(256), len);
		CHECK((moves ? write(fd, buffer, len) : pwrite(fd, buffer, len, at)) == len);
		if (at > *size)
			memset(bytes + *size, 0, at - *size);
		memcpy(bytes + at, buffer, len);
		if (at + len > *size)
			*size = at + len;
	} else {
		if (access_of(index) == O_WRONLY)
			return;
		long wanted = at >= *size ? 0 : len < *size - at ? len : *size - at;
		CHECK((moves ? read(fd, buffer, len) : pread(fd, buffer, len, at)) == wanted);
		CHECK(memcmp(buffer, bytes + at, wanted) == 0);
		len = wanted;
	}
	if (moves && len > 0)
		*offset_of(index) = at + len;
}

static void look_again(int index)
{
	/* So often that it is adopted where it may be. */
	char page[PAGE];
	if (access_of(index) == O_WRONLY)
		return;
	long size = model->files[file_of(index)].size, at = any(FILE_MAX / PAGE) * (long)PAGE;
	long wanted = at >= size ? 0 : size - at < PAGE ? size - at : PAGE;
	for (int i = 0; i < 40; i++) {
		CHECK(pread(own[index].fd, page, PAGE, at) == wanted);
		CHECK(memcmp(page, model->files[file_of(index)].bytes + at, wanted) == 0);
	}
}

static void seek(int index)
{
	long at = any(FILE_MAX), size = model->files[file_of(index)].size;
	CHECK(lseek(own[index].fd, 0, SEEK_CUR) == *offset_of(index));
	switch (any(3)) {
	case 0:
		CHECK(lseek(own[index].fd, at, SEEK_SET) == at);
		*offset_of(index) = at;
		break;
	case 1:
		CHECK(lseek(own[index].fd, 0, SEEK_END) == size);
		*offset_of(index) = size;
	}
}

static void cut(int index)
{
	if (access_of(index) == O_RDONLY)
		return;
	long *size = &model->files[file_of(index)].size, len = any(FILE_MAX);
	CHECK(ftruncate(own[index].fd, len) == 0);
	if (len > *size)
		memset(model->files[file_of(index)].bytes + *size, 0, len - *size);
	*size = len;
	struct stat st;
	CHECK(fstat(own[index].fd, &st) == 0 && st.st_size == len);
}

static void close_one(int index)
{
	switch (any(3)) {
	case 0:
		CHECK(close_range(own[index].fd, own[index].fd, 0) == 0);
		break;
	default:
		CHECK(close(own[index].fd) == 0);
	}
	own[index] = own[--owned];
}

static void duplicate(int index)
{
	int other = any(owned);
	if (any(2) && other != index) {
		/* In place of another one. */
		CHECK(dup2(own[index].fd, own[other].fd) == own[other].fd);
		own[other].description = own[index].description;
	} else if (owned < NUMBERS) {
		own[owned].fd = any(2) ? dup(own[index].fd) : fcntl(own[index].fd, F_DUPFD_CLOEXEC, 0);
		CHECK(own[owned].fd >= 0);
		own[owned++].description = own[index].description;
	}
}

/* ---- the turn is a byte in a pipe: who is killed does not have it ---- */

enum { TURN_IN = 300, TURN_OUT = 301 };

static void take_turn(void)
{
	char byte;
	ssize_t n;
	while ((n = read(TURN_IN, &byte, 1)) < 0 && errno == EINTR)
		;
	CHECK(n == 1);
	if (model->turns_left <= 0 || model->is_failed) {
		CHECK(write(TURN_OUT, "x", 1) == 1);
		exit(model->is_failed);
	}
	model->turns_left--;
}

static void pass_turn(void)
{
	CHECK(write(TURN_OUT, "x", 1) == 1);
	sched_yield();
}

static int place_of(pid_t pid)
{
	for (int i = 0; i < PROCESSES; i++)
		if (model->pids[i] == pid)
			return i;
	return -1;
}

static void fork_one(void)
{
	int place = place_of(0);
	if (place < 0)
		return;
	uint64_t seed = state + place;
	pid_t child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		/* The parent still has the turn. */
		state = seed * 31 + 7;
		return;
	}
	model->pids[place] = child;
}

static void leave(void)
{
	model->pids[place_of(getpid())] = 0;
	pass_turn();
	if (any(2))
		_exit(0);
	exit(0);
}

static void kill_one(void)
{
	int place = any(PROCESSES);
	pid_t pid = model->pids[place];
	if (pid == 0 || pid == getpid())
		return;
	/* Until it is gone: it could take the turn otherwise, and die with it. */
	struct pollfd gone = {.fd = syscall(SYS_pidfd_open, pid, 0), .events = POLLIN};
	CHECK(gone.fd >= 0 && kill(pid, SIGKILL) == 0 && poll(&gone, 1, -1) == 1 && close(gone.fd) == 0);
	model->pids[place] = 0;
}

/* The same program once more, with what is not close-on-exec. */
static char **arguments(void)
{
	static char texts[4 + 2 * NUMBERS][24], *list[4 + 2 * NUMBERS];
	int count = 3;
	list[0] = self;
	snprintf(texts[1], sizeof texts[1], "%llu", (unsigned long long)(state * 17 + 3));
	list[1] = texts[1];
	list[2] = model_path;
	for (int i = 0; i < owned; i++) {
		if (fcntl(own[i].fd, F_GETFD) & FD_CLOEXEC)
			continue;
		snprintf(texts[count], sizeof texts[count], "%d", own[i].fd);
		snprintf(texts[count + 1], sizeof texts[count + 1], "%d", own[i].description);
		list[count] = texts[count];
		list[count + 1] = texts[count + 1];
		count += 2;
	}
	list[count] = NULL;
	return list;
}

static void exec_one(void)
{
	char **list = arguments();
	pass_turn();
	execv(self, list);
	CHECK(!"exec");
}

static void spawn_one(void)
{
	pid_t child;
	int place = place_of(0);
	if (place >= 0) {
		CHECK(posix_spawn(&child, self, NULL, NULL, arguments(), environ) == 0);
		model->pids[place] = child;
	}
}

static void play(int is_root)
{
	/* A child of fork has no turn yet. */
	pid_t self_pid = getpid();
	for (;;) {
		take_turn();
		for (int i = 1 + any(TURN / 10); i > 0; i--) {
			int index = owned ? (int)any(owned) : -1;
			unsigned what = any(100);
			if (index < 0 || what < 2)
				open_one();
			else if (what < 20)
				transfer(index, 0, 1);
			else if (what < 30)
				transfer(index, 1, 1);
			else if (what < 40)
				transfer(index, 0, 0);
			else if (what < 48)
				transfer(index, 1, 0);
			else if (what < 84)
				look_again(index);
			else if (what < 92)
				seek(index);
			else if (what < 93)
				cut(index);
			else if (what < 97)
				close_one(index);
			else if (what < 98)
				duplicate(index);
		}
		unsigned what = any(100);
		if (what < 15)
			fork_one();
		else if (what < 17)
			spawn_one();
		else if (what < 30 && !is_root)
			leave();
		else if (what < 33)
			kill_one();
		else if (what < 40 && !is_root)
			exec_one();
		if (getpid() != self_pid) {
			self_pid = getpid();
			is_root = 0;
			continue;
		}
		pass_turn();
		while (is_root && waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
}

static void begin(void)
{
	int ends[2], fd = open(model_path, O_RDWR | O_CREAT | O_TRUNC, 0644);
	CHECK(fd >= 0 && ftruncate(fd, sizeof *model) == 0 && close(fd) == 0);
	for (int file = 0; file < FILES; file++) {
		fd = open(name(file), O_RDWR | O_CREAT | O_TRUNC, 0644);
		CHECK(fd >= 0 && close(fd) == 0);
	}
	CHECK(pipe(ends) == 0 && dup2(ends[0], TURN_IN) == TURN_IN && dup2(ends[1], TURN_OUT) == TURN_OUT);
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
}

static void map_model(void)
{
	int fd = open(model_path, O_RDWR | O_CLOEXEC);
	CHECK(fd >= 0);
	void *memory = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(memory != MAP_FAILED && close(fd) == 0);
	model = memory;
}

int main(int count, char **words)
{
	CHECK(count >= 3);
	self = words[0];
	state = strtoull(words[1], NULL, 10);
	model_path = words[2];
	/* A hang ends here. */
	alarm(240);
	if (fcntl(TURN_IN, F_GETFD) >= 0) {
		map_model();
		for (int i = 3; i + 1 < count; i += 2) {
			own[owned].fd = atoi(words[i]);
			own[owned++].description = atoi(words[i + 1]);
		}
		play(0);
	}
	begin();
	map_model();
	CHECK(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	model->turns_left = scaled(1200, 100);
	pid_t root = fork();
	if (root == 0) {
		/* Nobody kills it. */
		CHECK(write(TURN_OUT, "x", 1) == 1);
		play(1);
	}
	/* All that there are, whoever has made them. */
	while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
		;
	return model->is_failed || model->turns_left > 0;
}
