//! Looking up functions of libc: where the library finds those that it replaces, and what a program finds.
//!
//! A program that looks a function up in libc's own handle (`ctypes.CDLL("libc.so.6").pwrite`) would go
//! past the hooks. So `dlsym` and `dlvsym` are replaced: where a lookup in a handle ends at the very
//! definition that one of our functions stands before, the program gets ours. If somebody else's definition
//! comes between ours and libc's, it does not: that one looks for libc's, and ours calls it.
//!
//! Lookups with `RTLD_DEFAULT` and `RTLD_NEXT` depend on who calls. They are left to libc, by a jump that
//! leaves the caller's address where it was; the first finds our functions anyway, and the second is
//! how a definition finds the next. `dlopen` depends on its caller, too.
//!
//! `RTLD_DEEPBIND` has a library find libc's functions before ours, and so does a name space of its own
//! (`dlmopen`). The flag is not dropped: who sets it has symbols of the same names as somebody else's, and
//! would break. Instead all files are left to the kernel before (`Registry::leave_all`).
//!
//! To find libc's own `dlsym` there is no `dlsym`: its symbol table is read.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

use crate::real::slots;
use crate::{registry, section, thread};

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

routed! {
    dlsym, route_dlsym;
    dlvsym, route_dlvsym;
    dlopen, route_dlopen;
    dlmopen, route_dlmopen;
}

type Lookup = unsafe extern "C-unwind" fn(*mut c_void, *const c_char) -> *mut c_void;
type VersionLookup =
    unsafe extern "C-unwind" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;

/// libc's own, once found.
static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
static DLVSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

fn depends_on_caller(handle: *mut c_void) -> bool {
    [libc::RTLD_DEFAULT, libc::RTLD_NEXT].contains(&handle)
}

extern "C" fn route_dlsym(handle: *mut c_void) -> *const c_void {
    if depends_on_caller(handle) {
        libcs(&DLSYM, c"dlsym")
    } else {
        look_up as Lookup as *const c_void
    }
}

extern "C" fn route_dlvsym(handle: *mut c_void) -> *const c_void {
    if depends_on_caller(handle) {
        libcs(&DLVSYM, c"dlvsym")
    } else {
        look_up_version as VersionLookup as *const c_void
    }
}

unsafe extern "C-unwind" fn look_up(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: libc's function of that signature; as the caller vouches to `dlsym`.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, Lookup>(libcs(&DLSYM, c"dlsym"));
        let found = find(handle, name);
        if found.is_null() { found } else { hook_of(found, CStr::from_ptr(name)) }
    }
}

unsafe extern "C-unwind" fn look_up_version(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    // SAFETY: as in `look_up`.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, VersionLookup>(libcs(&DLVSYM, c"dlvsym"));
        let found = find(handle, name, version);
        if found.is_null() { found } else { hook_of(found, CStr::from_ptr(name)) }
    }
}

/// The next definition of a symbol after this library.
pub fn next(name: &CStr) -> *mut c_void {
    // SAFETY: as in `look_up`. It is called from here, and does not return to somebody else: `found`
    // is looked at.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, Lookup>(libcs(&DLSYM, c"dlsym"));
        let found = find(libc::RTLD_NEXT, name.as_ptr());
        if found.is_null() {
            // Nobody else need hear of it.
            libc::dlerror();
        }
        found
    }
}

/// What a program gets that has found `found` under this name.
fn hook_of(found: *mut c_void, name: &CStr) -> *mut c_void {
    if thread::record().is_inside() {
        return found;
    }
    let Some(ours) = own_object().and_then(|object| object.find(name)) else { return found };
    let Some(home) = home_of(found) else { return found };
    let next = next(name);
    if next.is_null() {
        match home.file_name() {
            // Its functions are system calls, and ours make them themselves.
            b"libaio.so.1" => return ours,
            // Ours have nothing to call on.
            name if name.starts_with(b"liburing.so") => leave_all(),
            _ => {}
        }
        return found;
    }
    if LIBC.contains(&home.file_name())
        && home_of(next).is_some_and(|other| other.base == home.base)
    {
        return ours;
    }
    found
}

/// Where libc's functions are, and were before glibc 2.34.
const LIBC: &[&[u8]] = &[b"libc.so.6", b"libpthread.so.0", b"libdl.so.2", b"librt.so.1"];

/// The object that an address lies in.
struct Home {
    base: usize,
    path: &'static CStr,
}

impl Home {
    fn file_name(&self) -> &[u8] {
        let path = self.path.to_bytes();
        path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
    }
}

fn home_of(address: *mut c_void) -> Option<Home> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: libc fills `info` unless it returns 0; the name lives as long as the object, which is one
    // that the program has just found a symbol in.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let info = info.assume_init();
        let path = (!info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname))?;
        Some(Home { base: info.dli_fbase.addr(), path })
    }
}

/// See `Registry::leave_all`.
pub fn leave_all() {
    if !thread::record().is_inside() {
        section::run(|_| registry::lock().leave_all());
    }
}

extern "C" fn route_dlopen(path: *const c_char, flags: c_int) -> *const c_void {
    if flags & libc::RTLD_DEEPBIND != 0 && !path.is_null() {
        leave_all();
    }
    libcs(&slots::dlopen, c"dlopen")
}

extern "C" fn route_dlmopen(space: c_long) -> *const c_void {
    if space != libc::LM_ID_BASE {
        leave_all();
    }
    libcs(&slots::dlmopen, c"dlmopen")
}

/// A function of libc's by its own symbol table; remembered in `slot`.
pub fn libcs(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    // Relaxed, here and below: whoever reads null finds the same address.
    let mut found = slot.load(Relaxed);
    if found.is_null() {
        found = Object::where_(|object| {
            [b"libc.so.6".as_slice(), b"libdl.so.2"].contains(&object.file_name)
                && object.find(name).is_some()
        })
        .and_then(|object| object.find(name))
        .unwrap_or_else(|| std::process::abort());
        slot.store(found, Relaxed);
    }
    found
}

/// This library. Never unmapped.
fn own_object() -> Option<Object> {
    static OWN: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
    let [base, dynamic] = OWN.each_ref().map(|word| word.load(Relaxed));
    if base != 0 && dynamic != 0 {
        return Some(Object { base, dynamic, file_name: b"" });
    }
    let home = home_of(own_object as *mut c_void)?;
    let object = Object::where_(|object| object.base == home.base)?;
    OWN[0].store(object.base, Relaxed);
    OWN[1].store(object.dynamic, Relaxed);
    Some(object)
}

/// A loaded object: where it lies, and its dynamic section.
#[derive(Clone, Copy)]
struct Object {
    base: usize,
    dynamic: usize,
    file_name: &'static [u8],
}

impl Object {
    /// The first loaded object that `chosen` takes.
    fn where_(chosen: impl Fn(&Object) -> bool) -> Option<Object> {
        struct Search<'a> {
            chosen: &'a dyn Fn(&Object) -> bool,
            found: Option<Object>,
        }
        unsafe extern "C" fn visit(
            info: *mut libc::dl_phdr_info,
            _size: usize,
            search: *mut c_void,
        ) -> c_int {
            const PT_DYNAMIC: u32 = 2;
            // SAFETY: libc describes an object that is loaded, while it keeps it so; `search` is
            // what `where_` gave.
            unsafe {
                let (info, search) = (&*info, &mut *search.cast::<Search<'_>>());
                let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
                let Some(dynamic) = headers.iter().find(|header| header.p_type == PT_DYNAMIC)
                else {
                    return 0;
                };
                let path = CStr::from_ptr(info.dlpi_name).to_bytes();
                let object = Object {
                    base: info.dlpi_addr as usize,
                    dynamic: info.dlpi_addr as usize + dynamic.p_vaddr as usize,
                    file_name: path.rsplit(|byte| *byte == b'/').next().unwrap_or(path),
                };
                if (search.chosen)(&object) {
                    search.found = Some(object);
                }
                c_int::from(search.found.is_some())
            }
        }
        let mut search = Search { chosen: &chosen, found: None };
        // SAFETY: `visit` takes what it is given, and `search` outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
        search.found
    }

    /// The address of an entry of the dynamic section.
    fn entry(&self, wanted: i64) -> Option<usize> {
        let mut entry = self.dynamic as *const [i64; 2];
        // SAFETY: the dynamic section is mapped while the object is loaded, and ends with a zero tag.
        unsafe {
            while (*entry)[0] != 0 {
                let [tag, value] = *entry;
                if tag == wanted {
                    let value = value as usize;
                    // glibc relocates these addresses in place; not every loader does.
                    return Some(if value < self.base { value + self.base } else { value });
                }
                entry = entry.add(1);
            }
        }
        None
    }

    /// A function that the object defines, by the hash table that every linker makes today.
    fn find(&self, name: &CStr) -> Option<*mut c_void> {
        const DT_STRTAB: i64 = 5;
        const DT_SYMTAB: i64 = 6;
        const DT_GNU_HASH: i64 = 0x6fff_fef5;
        let strings = self.entry(DT_STRTAB)? as *const c_char;
        let symbols = self.entry(DT_SYMTAB)? as *const libc::Elf64_Sym;
        let table = self.entry(DT_GNU_HASH)? as *const u32;
        let wanted = name
            .to_bytes()
            .iter()
            .fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
        // SAFETY: the tables are mapped while the object is loaded, and have the form that the ELF
        // specification and its GNU extension say: a header of four words, a Bloom filter of words
        // of 64 bits, the buckets, and a chain entry for each symbol from the first hashed one on.
        unsafe {
            let [bucket_count, first, filter_words] = [0, 1, 2].map(|index| *table.add(index));
            let buckets = table.add(4 + 2 * filter_words as usize);
            let chain = buckets.add(bucket_count as usize);
            let mut index = *buckets.add((wanted % bucket_count) as usize);
            if index < first {
                return None;
            }
            loop {
                let hash = *chain.add((index - first) as usize);
                let symbol = &*symbols.add(index as usize);
                if hash | 1 == wanted | 1
                    && symbol.st_shndx != 0
                    && CStr::from_ptr(strings.add(symbol.st_name as usize)) == name
                {
                    return Some(std::ptr::with_exposed_provenance_mut(
                        self.base + symbol.st_value as usize,
                    ));
                }
                if hash & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }
}
