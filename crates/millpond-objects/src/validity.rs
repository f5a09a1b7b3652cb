//! The current versions of objects, by slots in memory that clients in other processes map.
//!
//! ```text
//!   server: allocate -> validate* -> invalidate -> free      a slot for each entry of the directory
//!   client: validated_ms                                     before it uses bytes that it has found before
//! ```
//!
//! - **VT1** An entry has a slot until the last reference to it is gone. The number of the slot is the entry's own: it rises
//!   when the entry leaves the directory and when the slot is freed, and never repeats. So a client that has the number of
//!   an entry finds it only while the entry is in the directory.
//! - **VT2** The time of a slot is written by the entry that has the slot. A client loads the time before the number, so a
//!   matching number means that the time is of this entry or of an earlier one.
//! - **VT3** Clients have a descriptor that is open for reading only. The length of the memory is sealed.
//! - **VT4** No version is current after the server's process has ended, or serves no clients any more: later writes may
//!   not show in its table. A client may learn of the end late, such as after it was stopped, but the word of the owner (`owner`)
//!   says so before any other process can know.
//!
//! Locks: the list of free slots and the number of servers, leaf locks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::owner::{Owner, OwnerWord};

#[repr(C)]
struct Slot {
    number: AtomicU64,
    /// Start of the last request whose response named the version, by the server's clock.
    validated_ms: AtomicU64,
}

/// The start of the memory.
#[repr(C, align(64))]
struct TableHead {
    owner: OwnerWord,
}

/// Bytes of the table for each slot.
pub(crate) const SLOT_BYTES: u64 = size_of::<Slot>() as u64;

/// A mapping of the head and the slots.
#[derive(Debug)]
struct MappedSlots {
    head: NonNull<TableHead>,
    len: usize,
    /// A child of fork does not touch the mapping, which it shares with its parent.
    process: u32,
}

// SAFETY: the head and the slots consist of atomics, and the mapping is process-wide.
unsafe impl Send for MappedSlots {}
// SAFETY: as above.
unsafe impl Sync for MappedSlots {}

const fn table_bytes(len: usize) -> usize {
    size_of::<TableHead>() + len * size_of::<Slot>()
}

impl MappedSlots {
    fn map(memory: impl AsFd, len: usize, access: ProtFlags) -> io::Result<MappedSlots> {
        let bytes = table_bytes(len);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, memory, 0)
        }?;
        let head = NonNull::new(at.cast()).expect("the kernel maps nothing at 0");
        Ok(MappedSlots { head, len, process: std::process::id() })
    }

    #[inline]
    fn owner(&self) -> &OwnerWord {
        // SAFETY: within the mapping (VT3); any bytes are a valid atomic.
        unsafe { &self.head.as_ref().owner }
    }

    fn slot(&self, index: u32) -> Option<&Slot> {
        // SAFETY: within the mapping, whose length is sealed (VT3); any bytes are valid atomics.
        ((index as usize) < self.len)
            .then(|| unsafe { self.head.add(1).cast::<Slot>().add(index as usize).as_ref() })
    }
}

impl Drop for MappedSlots {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, which is not used again. A child of fork has a copy of its own.
        unsafe {
            _ = rustix::mm::munmap(self.head.as_ptr().cast(), table_bytes(self.len));
        }
    }
}

/// The server's side.
#[derive(Debug)]
pub(crate) struct ValidityTable {
    /// Dropped before the mapping.
    owner: Owner,
    slots: MappedSlots,
    memory: OwnedFd,
    free: Mutex<Vec<u32>>,
    servers: Mutex<usize>,
}

impl ValidityTable {
    pub(crate) fn new(len: u32) -> io::Result<Arc<ValidityTable>> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("millpond-validity", flags)?;
        // Descriptors of clients are opened by way of /proc, and so can't be opened for writing.
        rustix::fs::fchmod(&memory, Mode::RUSR)?;
        rustix::fs::ftruncate(&memory, table_bytes(len as usize) as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let slots = MappedSlots::map(&memory, len as usize, access)?;
        let word = NonNull::from(slots.owner());
        // SAFETY: the table drops the owner before the mapping.
        let owner = unsafe { Owner::start(word) }?;
        let free = Mutex::new((0..len).rev().collect());
        Ok(Arc::new(ValidityTable { owner, slots, memory, free, servers: Mutex::default() }))
    }

    /// Clients may use the table as long as one of the servers has not ended (VT4).
    pub(crate) fn begin_serving(&self) {
        let mut servers = self.servers.lock().expect("no panic under the lock");
        *servers += 1;
        if !self.is_the_parents() {
            self.owner.restore(self.slots.owner());
        }
    }

    pub(crate) fn end_serving(&self) {
        let mut servers = self.servers.lock().expect("no panic under the lock");
        *servers -= 1;
        if *servers == 0 && !self.is_the_parents() {
            self.owner.retire(self.slots.owner());
        }
    }

    /// A descriptor for a client (VT3).
    pub(crate) fn open_for_client(&self) -> io::Result<OwnedFd> {
        let path = format!("/proc/self/fd/{}", self.memory.as_raw_fd());
        Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// A slot for a new entry. `None`: all are taken, and clients ask the server for each read of the entry.
    pub(crate) fn allocate(self: &Arc<Self>, validated_ms: u64) -> Option<ValiditySlot> {
        if self.is_the_parents() {
            return None;
        }
        let index = self.free.lock().expect("no panic under the lock").pop()?;
        let slot = self.slots.slot(index).expect("in the table");
        // Release: pairs with `validated_ms`: the number rose when the slot was freed (VT2).
        slot.validated_ms.store(validated_ms, Release);
        // Relaxed: the lock of the list orders it after the free.
        let number = slot.number.load(Relaxed);
        Some(ValiditySlot { table: Arc::clone(self), index, number })
    }

    fn is_the_parents(&self) -> bool {
        self.slots.process != std::process::id()
    }
}

/// The slot of an entry (VT1).
#[derive(Debug)]
pub(crate) struct ValiditySlot {
    table: Arc<ValidityTable>,
    pub(crate) index: u32,
    pub(crate) number: u64,
}

impl ValiditySlot {
    fn slot(&self) -> Option<&Slot> {
        if self.table.is_the_parents() { None } else { self.table.slots.slot(self.index) }
    }

    /// The entry's version was current at this time.
    pub(crate) fn validate(&self, validated_ms: u64) {
        if let Some(slot) = self.slot() {
            // Release: as in `allocate`.
            slot.validated_ms.fetch_max(validated_ms, Release);
        }
    }

    /// The entry leaves the directory.
    pub(crate) fn invalidate(&self) {
        if let Some(slot) = self.slot() {
            // Release: pairs with `validated_ms`. The reply to the writer comes after this store.
            slot.number.fetch_max(self.number + 1, Release);
        }
    }
}

impl Drop for ValiditySlot {
    fn drop(&mut self) {
        self.invalidate();
        if !self.table.is_the_parents() {
            self.table.free.lock().expect("no panic under the lock").push(self.index);
        }
    }
}

/// The client's side: a read-only mapping of the server's table.
///
/// # Examples
///
/// ```
/// use millpond::internals::shared::MemoryChoice;
/// use millpond_objects::{CachedStore, serving::Validity};
/// # use std::os::fd::AsFd;
/// # let remote = std::sync::Arc::new(object_store::memory::InMemory::new());
/// let store = CachedStore::builder(remote).shared(MemoryChoice::Auto).build().unwrap();
/// let validity = Validity::map(store.validity_for_client().unwrap().as_fd()).unwrap();
/// assert_eq!(validity.validated_ms(0, 1), None, "no entry has this number yet");
/// ```
#[derive(Debug)]
pub struct Validity {
    slots: MappedSlots,
}

impl Validity {
    /// Maps the table by the descriptor that the server has sent.
    ///
    /// # Errors
    ///
    /// `InvalidData`: the descriptor is not of such a table. Others: the system gives no address space.
    pub fn map(memory: BorrowedFd<'_>) -> io::Result<Validity> {
        let bytes = u64::try_from(rustix::fs::fstat(memory)?.st_size).unwrap_or(0);
        let sealed = rustix::fs::fcntl_get_seals(memory)?.contains(SealFlags::SHRINK);
        let of_slots = bytes.saturating_sub(size_of::<TableHead>() as u64);
        let len = usize::try_from(of_slots / SLOT_BYTES).unwrap_or(0);
        if !sealed || len == 0 || !of_slots.is_multiple_of(SLOT_BYTES) {
            let what = "not a table of valid versions";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(Validity { slots: MappedSlots::map(memory, len, ProtFlags::READ)? })
    }

    /// When the version with this number of slot `index` was current for the last time, in milliseconds of the server's
    /// clock. `None`: it may have been replaced, or the server has ended (VT4), and the server has to be asked. No system
    /// call, no lock.
    #[must_use]
    #[inline]
    pub fn validated_ms(&self, index: u32, number: u64) -> Option<u64> {
        if !self.slots.owner().is_alive() {
            return None;
        }
        let slot = self.slots.slot(index)?;
        // Acquire: pairs with the stores of the time, each of which comes after the number rose (VT2).
        let validated_ms = slot.validated_ms.load(Acquire);
        // Acquire: pairs with `invalidate`.
        (slot.number.load(Acquire) == number).then_some(validated_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table_and_view(len: u32) -> (Arc<ValidityTable>, Validity) {
        let table = ValidityTable::new(len).unwrap();
        let view = Validity::map(table.open_for_client().unwrap().as_fd()).unwrap();
        (table, view)
    }

    #[test]
    fn a_number_is_of_one_entry() {
        let (table, view) = table_and_view(1);
        let first = table.allocate(10).unwrap();
        let (index, number) = (first.index, first.number);
        assert!(table.allocate(10).is_none(), "one slot");
        assert_eq!(view.validated_ms(index, number), Some(10));
        first.validate(30);
        first.validate(20);
        assert_eq!(view.validated_ms(index, number), Some(30));
        first.invalidate();
        assert_eq!(view.validated_ms(index, number), None);
        assert!(
            table.allocate(10).is_none(),
            "late validations of the entry must not meet another's"
        );
        first.validate(40);
        drop(first);
        let second = table.allocate(5).unwrap();
        assert_eq!(second.index, index);
        assert_eq!(view.validated_ms(index, number), None);
        assert_eq!(view.validated_ms(index, second.number), Some(5));
        assert_eq!(view.validated_ms(7, 0), None, "no such slot");
    }

    #[test]
    fn no_version_is_current_without_a_server() {
        let (table, view) = table_and_view(1);
        let slot = table.allocate(10).unwrap();
        let validated = || view.validated_ms(slot.index, slot.number);
        for _ in 0..2 {
            table.begin_serving();
            table.begin_serving();
            table.end_serving();
            assert_eq!(validated(), Some(10));
            table.end_serving();
            assert_eq!(validated(), None);
        }
        table.begin_serving();
        assert_eq!(validated(), Some(10));
        let (index, number) = (slot.index, slot.number);
        drop(slot);
        let next = table.allocate(20).unwrap();
        assert_eq!(view.validated_ms(index, next.number), Some(20));
        assert_ne!(next.number, number);
        // The next entry's slot and the table go together with its last reference.
        drop(table);
        assert!(view.slots.owner().is_alive());
        drop(next);
        assert!(!view.slots.owner().is_alive());
    }

    /// Goal: a client can't write to the table, and refuses descriptors of other files.
    #[test]
    fn clients_only_read() {
        let (table, _view) = table_and_view(4);
        let client = table.open_for_client().unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        assert!(MappedSlots::map(&client, 4, access).is_err());
        assert_eq!(rustix::fs::fstat(&client).unwrap().st_mode & 0o777, 0o400);
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(Validity::map(file.as_fd()).is_err());
    }
}
