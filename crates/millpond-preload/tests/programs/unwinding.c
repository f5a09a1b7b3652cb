/* Whether who unwinds a stack finds its way through the functions that go on in libc's with all
   arguments as they came. Prints the names of those through which it does not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

/* Of libgcc: what describes the frame of the function around an address. */
extern const void *_Unwind_Find_FDE(void *at, void *bases);

int main(void)
{
	static const char *const names[] = {
		"syscall", "clone", "__clone", "dlsym", "dlvsym", "dlopen", "dlmopen",
		"execl", "execle", "execlp", "dprintf",
	};
	void *bases[3];
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		char *function = dlsym(RTLD_DEFAULT, names[i]);
		if (!function || !_Unwind_Find_FDE(function + 4, bases))
			puts(names[i]);
	}
	return 0;
}
