/* Whether an unwinder can pass through the functions that continue in libc's with unchanged arguments. Prints the
   names of the functions through which it cannot. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

/* Of libgcc: finds the description of the frame of the function around an address. */
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
