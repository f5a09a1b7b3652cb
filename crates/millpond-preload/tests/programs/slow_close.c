/* The close of a socket that lingers does not delay other calls: another process opens a served file, and another
   thread opens and closes files, before that close returns. `slow_close dup2|close_range|closefrom|close`. Prints
   nothing and returns 0 if that holds. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"

/* Shorter than the kernel's wait for a lease, 45 s, and than the linger time of the socket. */
enum { PATIENCE_MS = 30000, LINGER_S = 120, NUMBER = 900 };

static const char *way;
static volatile int has_begun, has_ended;
static int lingering, peer;

/* A socket with unsent bytes that the peer does not read: its close waits. */
static void make_lingering(void)
{
	static char bytes[65536];
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	struct linger linger = {1, LINGER_S};
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	CHECK(server >= 0 && client >= 0);
	CHECK(bind(server, (void *)&address, len) == 0 && getsockname(server, (void *)&address, &len) == 0);
	CHECK(listen(server, 1) == 0 && connect(client, (void *)&address, len) == 0);
	CHECK((peer = accept(server, NULL, NULL)) >= 0 && close(server) == 0);
	CHECK(fcntl(client, F_SETFL, O_NONBLOCK) == 0);
	while (write(client, bytes, sizeof bytes) > 0)
		;
	CHECK(fcntl(client, F_SETFL, 0) == 0);
	CHECK(setsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	CHECK(dup2(client, NUMBER) == NUMBER && close(client) == 0);
	lingering = NUMBER;
}

static void *close_slowly(void *unused)
{
	has_begun = 1;
	if (!strcmp(way, "dup2"))
		CHECK(dup2(2, lingering) == lingering);
	else if (!strcmp(way, "dup2_file"))
		CHECK(dup2(open("other", O_RDONLY), lingering) == lingering);
	else if (!strcmp(way, "close_range"))
		CHECK(close_range(lingering - 5, lingering + 5, 0) == 0);
	else if (!strcmp(way, "closefrom"))
		closefrom(lingering - 5);
	else
		CHECK(close(lingering) == 0);
	has_ended = 1;
	return NULL;
}

int main(int count, char **arguments)
{
	int go[2], done[2], status;
	char page[PAGE], byte;
	sigset_t child;
	way = arguments[1];
	/* Any signal ends the wait of a socket that lingers, also the signal of the other process's exit. */
	CHECK(sigemptyset(&child) == 0 && sigaddset(&child, SIGCHLD) == 0 && sigprocmask(SIG_BLOCK, &child, NULL) == 0);
	make_pages("f", 0);
	make_pages("other", 0);
	CHECK(pipe2(go, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0);
	pid_t other = fork();
	CHECK(other >= 0);
	if (other == 0) {
		CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && close(go[1]) == 0);
		CHECK(read(go[0], &byte, 1) == 1);
		int fd = open("f", O_RDWR);
		memset(page, 99, PAGE);
		CHECK(fd >= 0 && pwrite(fd, page, PAGE, 0) == PAGE && close(fd) == 0);
		CHECK(write(done[1], &byte, 1) == 1);
		_exit(0);
	}
	int fd = open("f", O_RDONLY | O_CLOEXEC);
	CHECK(fd >= 0);
	for (int i = 0; i < 2000; i++)
		CHECK(pread(fd, page, PAGE, i % 8 * PAGE) == PAGE && is_all(page, PAGE, i % 8));
	make_lingering();
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, close_slowly, NULL) == 0);
	while (!has_begun)
		usleep(1000);
	usleep(100000);
	CHECK(!has_ended);
	CHECK(write(go[1], "g", 1) == 1);
	struct pollfd answer = {.fd = done[0], .events = POLLIN};
	CHECK(poll(&answer, 1, PATIENCE_MS) == 1 && !has_ended);
	CHECK(pread(fd, page, PAGE, 0) == PAGE && is_all(page, PAGE, 99));
	int more = open("other", O_RDWR | O_CLOEXEC);
	CHECK(more >= 0 && pread(more, page, PAGE, 0) == PAGE && close(more) == 0 && !has_ended);
	/* A reset ends the wait. */
	CHECK(close(peer) == 0);
	pthread_join(thread, NULL);
	if (!strncmp(way, "dup2", 4))
		CHECK(fcntl(lingering, F_GETFD) == 0);
	else
		CHECK(fcntl(lingering, F_GETFD) == -1 && errno == EBADF);
	if (!strcmp(way, "dup2_file"))
		CHECK(read(lingering, page, PAGE) == PAGE && is_all(page, PAGE, 0) && close(lingering) == 0);
	CHECK(waitpid(other, &status, 0) == other && status == 0);
	return 0;
}
