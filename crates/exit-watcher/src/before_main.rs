//! [`before_main`]: runs a function before `main`.

/// Runs a function of the binary after it is loaded, before `main` and before std's runtime starts. The process continues
/// with `main` when the function returns. Use it at most once per module.
///
/// The setup of std's runtime has not run: SIGPIPE has its inherited action, descriptors 0 to 2 may be closed, and a stack
/// overflow is not reported as such. Arguments and environment are available.
#[macro_export]
macro_rules! before_main {
    ($function:path) => {
        // SAFETY: the section contains functions of this type, which the C library calls with three
        // arguments; a function of the C calling convention may ignore them. std's function, which stores
        // the arguments, has a priority and runs first.
        #[used]
        #[unsafe(link_section = ".init_array")]
        static BEFORE_MAIN: extern "C" fn() = {
            extern "C" fn before_main() {
                $function();
            }
            before_main
        };
    };
}
