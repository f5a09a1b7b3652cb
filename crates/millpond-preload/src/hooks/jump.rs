//! Functions that go on in another one with all arguments as they came, which Rust has no way to
//! write.

/// Functions that go on in another one with all arguments as they came: in the one whose address
/// `$route` returns, which is called with the first arguments.
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

/// A variadic function: calls `$before` with the first argument, then jumps to libc's with all
/// arguments as they came, those in vector registers and on the stack included.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic {
    ($($name:ident, $before:path;)*) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C-unwind" fn $name() -> c_int {
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
                "sub rsp, 128",
                "movups [rsp], xmm0", "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2", "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
                "call {before}",
                "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]", "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax", "pop rax",
                "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "pop rbp",
                ".cfi_def_cfa rsp, 8",
                "jmp qword ptr [rip + {real}]",
                ".cfi_endproc",
                before = sym $before,
                real = sym $crate::runtime::libc_calls::slots::$name,
            )
        }
    )*};
}
/// Not written yet for others.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! variadic {
    ($name:ident, $before:path;) => {
        const _: () = {
            let _ = $before;
        };
    };
}
pub(crate) use variadic;
