//! Loaded objects and their symbols, to find the definitions that this library replaces.
//!
//! libc's own `dlsym` is found in its symbol table, as there is no other `dlsym` to find it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

pub type Lookup = unsafe extern "C-unwind" fn(*mut c_void, *const c_char) -> *mut c_void;
/// libc's own `dlsym`, once found.
static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The next definition of a symbol after this library.
pub fn next(name: &CStr) -> *mut c_void {
    // SAFETY: as in `look_up`. The call is made from this library, not as a tail call on behalf of
    // a caller: `found` is used below.
    unsafe {
        let find = std::mem::transmute::<*mut c_void, Lookup>(libcs(&DLSYM, c"dlsym"));
        let found = find(libc::RTLD_NEXT, name.as_ptr());
        if found.is_null() {
            // Clears the error message, which the program must not see.
            libc::dlerror();
        }
        found
    }
}

/// A function of libc, found in its own symbol table; remembered in `slot`.
pub fn libcs(slot: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    // Relaxed, here and below: a thread that reads null finds the same address.
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

/// Libraries that have libc's functions, and had them before glibc 2.34.
pub const LIBC: &[&[u8]] = &[b"libc.so.6", b"libpthread.so.0", b"libdl.so.2", b"librt.so.1"];

/// The object that an address lies in.
pub struct Home {
    pub base: usize,
    pub file_name: &'static [u8],
}

pub fn home_of(address: *mut c_void) -> Option<Home> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: libc fills `info` unless it returns 0; the name lives as long as the object, which is
    // one that the program has just found a symbol in.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let info = info.assume_init();
        let path = (!info.dli_fname.is_null()).then_some(info.dli_fname)?;
        Some(Home { base: info.dli_fbase.addr(), file_name: file_name(path) })
    }
}

/// The last part of a path.
///
/// # Safety
///
/// It is NUL-terminated, and lives on.
unsafe fn file_name(path: *const c_char) -> &'static [u8] {
    // SAFETY: the caller's duty.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

/// This library. Never unmapped.
pub fn own_object() -> Option<Object> {
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
pub struct Object {
    base: usize,
    dynamic: usize,
    pub file_name: &'static [u8],
}

/// Checks a loaded object; returns whether to stop.
type Look<'a> = &'a mut dyn FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr]) -> bool;

/// The first result of `look` among the loaded objects, which begin with the program's own.
pub fn find_loaded<R>(
    mut look: impl FnMut(&libc::dl_phdr_info, &[libc::Elf64_Phdr]) -> Option<R>,
) -> Option<R> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        look: *mut c_void,
    ) -> c_int {
        // SAFETY: libc describes an object that stays loaded during this call; the pointer is to the `look`
        // passed below.
        unsafe {
            let (info, look) = (&*info, &mut *look.cast::<Look<'_>>());
            let headers = std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            c_int::from(look(info, headers))
        }
    }
    let mut found = None;
    let mut look: Look<'_> = &mut |info, headers| {
        found = look(info, headers);
        found.is_some()
    };
    // SAFETY: libc's function of that signature; `visit` takes the pointer to `look`, which outlives the call.
    unsafe {
        let iterate = std::mem::transmute::<*mut c_void, Iterate>(libcs_iterate());
        iterate(Some(visit), (&raw mut look).cast());
    }
    found
}

type Iterate = unsafe extern "C" fn(
    Option<unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int>,
    *mut c_void,
) -> c_int;

/// The loader's entry for an object (`<link.h>`).
#[repr(C)]
struct LinkMap {
    base: usize,
    path: *const c_char,
    dynamic: usize,
    next: *const LinkMap,
}

/// The loader's list of objects (`<link.h>`).
#[repr(C)]
struct Loaded {
    version: c_int,
    first: *const LinkMap,
}

/// libc's own `dl_iterate_phdr`. By its name a sanitizer's may be found, which calls libc's by an address that the
/// runtime looks up later than this library is first called.
fn libcs_iterate() -> *mut c_void {
    static ITERATE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    unsafe extern "C" {
        static _r_debug: Loaded;
    }
    let mut found = ITERATE.load(Relaxed);
    if found.is_null() {
        // SAFETY: first called while this library is loaded, or before, by the only thread: the list does not
        // change. The loader's strings are NUL-terminated.
        found = unsafe {
            let mut map = (&raw const _r_debug).read().first;
            loop {
                let Some(object) = map.as_ref() else { break std::ptr::null_mut() };
                let file_name = file_name(object.path);
                if file_name == b"libc.so.6" {
                    let libc = Object { base: object.base, dynamic: object.dynamic, file_name };
                    break libc.find(c"dl_iterate_phdr").unwrap_or(std::ptr::null_mut());
                }
                map = object.next;
            }
        };
        if found.is_null() {
            // Another name for the same function, which sanitizers do not replace.
            found = libc::dl_iterate_phdr as *mut c_void;
        }
        ITERATE.store(found, Relaxed);
    }
    found
}

impl Object {
    /// The first loaded object that `chosen` accepts.
    fn where_(chosen: impl Fn(&Object) -> bool) -> Option<Object> {
        find_loaded(|info, headers| Object::of(info, headers).filter(&chosen))
    }

    /// An object that `find_loaded` passes on.
    pub fn of(info: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) -> Option<Object> {
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        Some(Object {
            base: info.dlpi_addr as usize,
            dynamic: (info.dlpi_addr + dynamic.p_vaddr) as usize,
            // SAFETY: the loader's, NUL-terminated.
            file_name: unsafe { file_name(info.dlpi_name) },
        })
    }

    /// An entry of the dynamic section.
    fn word(&self, wanted: i64) -> Option<usize> {
        let mut entry = self.dynamic as *const [i64; 2];
        // SAFETY: the dynamic section is mapped while the object is loaded, and ends with a zero
        // tag.
        unsafe {
            while (*entry)[0] != 0 {
                let [tag, value] = *entry;
                if tag == wanted {
                    return Some(value as usize);
                }
                entry = entry.add(1);
            }
        }
        None
    }

    /// The same, for an address.
    fn entry(&self, wanted: i64) -> Option<usize> {
        // glibc relocates these addresses in place; not every loader does.
        self.word(wanted).map(|value| if value < self.base { value + self.base } else { value })
    }

    /// A function that the object defines, in any version.
    pub fn find(&self, name: &CStr) -> Option<*mut c_void> {
        let tables = self.tables()?;
        let mut found = None;
        tables.each(name, Tables::hash(name), |symbol, _| {
            found = Some(tables.address(symbol));
            true
        });
        found
    }

    /// The tables of the object's definitions, with the hash table that all current linkers write.
    pub fn tables(&self) -> Option<Tables> {
        const DT_STRTAB: i64 = 5;
        const DT_SYMTAB: i64 = 6;
        const DT_GNU_HASH: i64 = 0x6fff_fef5;
        const DT_VERSYM: i64 = 0x6fff_fff0;
        let table = self.entry(DT_GNU_HASH)? as *const u32;
        // SAFETY: the tables are mapped while the object is loaded. The ELF specification and its
        // GNU extension define their form: a header of four words, a Bloom filter of words
        // of 64 bits, the buckets, and a chain entry for each symbol from the first hashed one on.
        unsafe {
            let [bucket_count, first, filter_words, shift] =
                [0, 1, 2, 3].map(|index| *table.add(index));
            let filter = table.add(4).cast::<u64>();
            let buckets = filter.add(filter_words as usize).cast::<u32>();
            Some(Tables {
                base: self.base,
                strings: self.entry(DT_STRTAB)? as *const c_char,
                symbols: self.entry(DT_SYMTAB)? as *const libc::Elf64_Sym,
                versions: self.entry(DT_VERSYM).map_or(std::ptr::null(), |at| at as *const u16),
                filter,
                filter_words,
                shift,
                buckets,
                bucket_count,
                chain: buckets.add(bucket_count as usize),
                first,
            })
        }
    }
}

/// The tables of an object that is loaded.
#[derive(Clone, Copy)]
pub struct Tables {
    base: usize,
    strings: *const c_char,
    symbols: *const libc::Elf64_Sym,
    /// A word for each symbol; null where the object has no versions.
    versions: *const u16,
    filter: *const u64,
    filter_words: u32,
    shift: u32,
    buckets: *const u32,
    bucket_count: u32,
    chain: *const u32,
    first: u32,
}

impl Tables {
    pub fn hash(name: &CStr) -> u32 {
        let add = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
        name.to_bytes().iter().fold(5381, add)
    }

    pub fn address(&self, symbol: &libc::Elf64_Sym) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.base + symbol.st_value as usize)
    }

    /// Visits the definitions of `name`, whose hash is `wanted`, until `visit` stops. Each comes with a flag that
    /// says whether it is hidden: of a version that is not the default.
    pub fn each(
        &self,
        name: &CStr,
        wanted: u32,
        mut visit: impl FnMut(&libc::Elf64_Sym, bool) -> bool,
    ) {
        const HIDDEN: u16 = 0x8000;
        // SAFETY: as in `Object::tables`; the object's linker ensures that each index is within the table that it is
        // used for.
        unsafe {
            let word = *self.filter.add(((wanted / 64) & (self.filter_words - 1)) as usize);
            let has_bit = |at: u32| (word >> (at % 64)) & 1 != 0;
            if !has_bit(wanted) || !has_bit(wanted >> self.shift) {
                return;
            }
            let mut index = *self.buckets.add((wanted % self.bucket_count) as usize);
            if index < self.first {
                return;
            }
            loop {
                let hash = *self.chain.add((index - self.first) as usize);
                let symbol = &*self.symbols.add(index as usize);
                let is_hidden =
                    || !self.versions.is_null() && *self.versions.add(index as usize) & HIDDEN != 0;
                if hash | 1 == wanted | 1
                    && symbol.st_shndx != 0
                    && CStr::from_ptr(self.strings.add(symbol.st_name as usize)) == name
                    && visit(symbol, is_hidden())
                {
                    return;
                }
                if hash & 1 != 0 {
                    return;
                }
                index += 1;
            }
        }
    }
}
