//! Functions that go on in another one with all arguments as they came.

/// Functions that go on in another one with all arguments as they came: in the one whose address `$route`
/// returns, which is called with the first arguments.
macro_rules! routed {
    ($($name:ident, $route:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                ".cfi_startproc",
                "push rbp",
                // A handler may end the thread here.
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rsp",
                ".cfi_def_cfa_register rbp",
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9",
                "push rax", "push rax",
                "call {route}",
                "mov r11, rax",
                "pop rax", "pop rax",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "pop rbp",
                ".cfi_def_cfa rsp, 8",
                "jmp r11",
                ".cfi_endproc",
                route = sym $route,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                ".cfi_startproc",
                "stp x29, x30, [sp, #-80]!",
                ".cfi_def_cfa_offset 80",
                ".cfi_offset x29, -80",
                ".cfi_offset x30, -72",
                "mov x29, sp",
                ".cfi_def_cfa_register x29",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "bl {route}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]",
                "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                ".cfi_def_cfa sp, 0",
                ".cfi_restore x29",
                ".cfi_restore x30",
                "br x16",
                ".cfi_endproc",
                route = sym $route,
            );
        }
    )*};
}
pub(crate) use routed;
