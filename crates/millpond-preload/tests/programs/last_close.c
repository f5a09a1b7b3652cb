/* After the last close of a file the process has it open nowhere: it can be executed, and its space and its file
   system are free. `last_close ROUNDS`. Prints nothing and returns 0 if that holds. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

extern char **environ;
static volatile int is_over;

/* Another thread uses another file. */
static void *read_busily(void *unused)
{
	char page[PAGE];
	int fd = open("busy", O_RDONLY | O_CLOEXEC);
	while (!is_over)
		CHECK(pread(fd, page, PAGE, 0) == PAGE);
	CHECK(close(fd) == 0);
	return NULL;
}

/* Without the library's view: by the kernel's list of descriptors. */
static int open_count(struct stat *of)
{
	char path[64];
	struct stat found;
	struct dirent *entry;
	int count = 0;
	DIR *list = opendir("/proc/self/fd");
	CHECK(list != NULL);
	while ((entry = readdir(list)) != NULL) {
		snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
		if (stat(path, &found) == 0 && found.st_ino == of->st_ino && found.st_dev == of->st_dev)
			count++;
	}
	CHECK(closedir(list) == 0);
	return count;
}

static void use(int fd)
{
	char page[PAGE];
	for (int i = 0; i < 600; i++)
		CHECK(pread(fd, page, PAGE, i % 8 * PAGE) == PAGE);
}

static void write_program(char *memory, size_t len, int how)
{
	struct stat of;
	int fd = open("program", O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
	CHECK(fd >= 0 && write(fd, memory, len) == (ssize_t)len && fstat(fd, &of) == 0);
	if (how & 1)
		use(fd);
	switch (how / 2 % 4) {
	case 0:
		CHECK(close(fd) == 0);
		break;
	case 1:
		CHECK(syscall(SYS_close, fd) == 0);
		break;
	case 2:
		CHECK(dup2(2, fd) == fd && close(fd) == 0);
		break;
	default:
		CHECK(close_range(fd, fd, 0) == 0);
	}
	CHECK(open_count(&of) == 0);
	char *arguments[] = {"./program", NULL};
	pid_t child;
	int status;
	CHECK(posix_spawn(&child, "./program", NULL, NULL, arguments, environ) == 0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(unlink("program") == 0);
}

static void read_file(void)
{
	struct stat of;
	int fd = open("read", O_RDONLY | O_CLOEXEC), other = open("read", O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0 && other >= 0 && fstat(fd, &of) == 0);
	use(fd);
	use(other);
	CHECK(close(other) == 0);
	use(fd);
	CHECK(close(fd) == 0);
	CHECK(open_count(&of) == 0);
}

int main(int count, char **arguments)
{
	static char memory[1 << 20];
	int rounds = scaled(atoi(arguments[1]), 8);
	int fd = open("/bin/true", O_RDONLY | O_CLOEXEC);
	ssize_t len = read(fd, memory, sizeof memory);
	CHECK(len > 0 && len < (ssize_t)sizeof memory && close(fd) == 0);
	make_pages("busy", 0);
	make_pages("read", 0);
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, read_busily, NULL) == 0);
	for (int i = 0; i < rounds; i++) {
		write_program(memory, len, i);
		read_file();
	}
	is_over = 1;
	pthread_join(thread, NULL);
	return 0;
}
