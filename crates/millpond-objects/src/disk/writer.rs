//! Collects pages into chunks; a thread writes the chunks to the disk.
//!
//! ```text
//!   free -> filling -> full -> being written -> free          (states of a chunk buffer)
//! ```
//!
//! Locks: the state lock is held while a page is copied, and never during I/O. It is never held together with the index
//! lock.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use libc::{EDQUOT, EFBIG, ENOSPC};
use millpond::{Buffer, File};

use crate::disk::layout::{Entry, HEAD_BYTES, PageId};
use crate::disk::shared::{DiskCounters, TierShared};

/// One is being filled, one waits, one is being written.
pub(crate) const CHUNK_BUFFERS_MIN: u64 = 3;
/// Pause after a failed write; doubled after each consecutive failure, up to [`PAUSE_MAX`]. Untuned.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Memory of a chunk, and the entries of the pages in it.
#[derive(Debug)]
struct ChunkBuffer {
    memory: Buffer,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct State {
    filling: Option<ChunkBuffer>,
    full: VecDeque<ChunkBuffer>,
    free: Vec<ChunkBuffer>,
    is_closing: bool,
}

#[derive(Debug)]
pub(crate) struct Writer {
    state: Mutex<State>,
    wake: Condvar,
}

/// State of the chunk ring. Only the writer thread uses it.
#[derive(Debug)]
pub(crate) struct ChunkRing {
    pub(crate) next: u32,
    pub(crate) sequence: u64,
    /// The file's head is written.
    pub(crate) has_head: bool,
    /// Memory to read back the chunk that is overwritten next.
    pub(crate) spare: Buffer,
}

/// Pages to write again (disk.T4), with their offset in `spare`.
type CarriedPages = Vec<(PageId, usize)>;

impl Writer {
    /// Creates a writer; each buffer has room for one chunk.
    pub(crate) fn new(buffers: Vec<Buffer>) -> Writer {
        let free =
            buffers.into_iter().map(|memory| ChunkBuffer { memory, entries: Vec::new() }).collect();
        let state = State { filling: None, full: VecDeque::new(), free, is_closing: false };
        Writer { state: Mutex::new(state), wake: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }

    /// Copies a page into a chunk buffer, or drops it if there is none (disk.T5).
    pub(crate) fn enqueue_page(&self, shared: &TierShared, id: PageId, bytes: &[u8]) {
        let layout = &shared.layout;
        let mut state = self.state();
        // Relaxed: set under the lock.
        let is_off = shared.counts.is_off.load(Relaxed);
        let buffer = match is_off {
            true => None,
            false => state.filling.take().or_else(|| state.free.pop()),
        };
        let Some(mut buffer) = buffer else {
            DiskCounters::add(&shared.counts.pages_dropped, 1);
            return;
        };
        let at = layout.header_bytes() + buffer.entries.len() * layout.page_bytes as usize;
        let page = &mut buffer.memory[at..at + layout.page_bytes as usize];
        page[..bytes.len()].copy_from_slice(bytes);
        page[bytes.len()..].fill(0);
        buffer.entries.push(Entry { id, checksum: id.checksum(page) });
        if buffer.entries.len() == layout.slots as usize {
            state.full.push_back(buffer);
            drop(state);
            self.wake.notify_one();
        } else {
            state.filling = Some(buffer);
        }
    }

    /// Lets the thread write the queued pages and then end.
    pub(crate) fn close(&self) {
        self.state().is_closing = true;
        self.wake.notify_one();
    }

    /// Waits for the next buffer to write. `None`: the writer is closed and all are written.
    fn next(&self) -> Option<ChunkBuffer> {
        let mut state = self.state();
        loop {
            if let Some(buffer) = state.full.pop_front() {
                return Some(buffer);
            }
            if state.is_closing {
                return state.filling.take();
            }
            state = self.wake.wait(state).expect("no panic under the lock");
        }
    }

    fn release_buffer(&self, mut buffer: ChunkBuffer) {
        buffer.entries.clear();
        self.state().free.push(buffer);
    }

    /// Main loop of the writer thread.
    pub(crate) fn run(&self, shared: &TierShared, mut ring: ChunkRing) {
        let mut pause = PAUSE;
        while let Some(mut buffer) = self.next() {
            let carried = ring.take_pages_to_carry(shared);
            let is_written = ring.write(shared, &mut buffer);
            self.release_buffer(buffer);
            if is_written {
                pause = PAUSE;
                let page_bytes = shared.layout.page_bytes as usize;
                for (id, at) in carried {
                    self.enqueue_page(shared, id, &ring.spare[at..at + page_bytes]);
                }
            } else {
                self.pause_writing(shared, pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
    }

    /// Pauses after a failed write: drops queued and new pages for the time of the pause (disk.T6).
    fn pause_writing(&self, shared: &TierShared, pause: Duration) {
        let until = Instant::now() + pause;
        let mut state = self.state();
        shared.counts.is_off.store(true, Relaxed);
        let lost: Vec<_> = state.filling.take().into_iter().chain(state.full.drain(..)).collect();
        let pages: usize = lost.iter().map(|buffer| buffer.entries.len()).sum();
        DiskCounters::add(&shared.counts.pages_dropped, pages as u64);
        for mut buffer in lost {
            buffer.entries.clear();
            state.free.push(buffer);
        }
        while let Some(left) = until.checked_duration_since(Instant::now())
            && !state.is_closing
        {
            state = self.wake.wait_timeout(state, left).expect("no panic under the lock").0;
        }
        shared.counts.is_off.store(false, Relaxed);
    }
}

/// Writes all bytes, or returns an errno.
fn write(file: &File, bytes: &[u8], offset: u64) -> Result<(), i32> {
    match file.write_at(bytes, offset) {
        Ok(moved) if moved == bytes.len() => Ok(()),
        Ok(_) => Err(ENOSPC),
        Err(error) => Err(error.errno()),
    }
}

impl ChunkRing {
    /// Reads the chunk that is overwritten next into `spare`, removes its pages from the index, and returns those that
    /// were read since they were written.
    fn take_pages_to_carry(&mut self, shared: &TierShared) -> CarriedPages {
        let TierShared { layout, index, file, .. } = shared;
        let (used, mut carried) = (index.used(self.next), CarriedPages::new());
        let is_read = !used.is_empty()
            && file.file().read_at(&mut self.spare, layout.chunk_offset(self.next)).is_ok();
        index.remove_chunk(self.next);
        let header = if is_read { layout.read_header(&self.spare, self.next) } else { None };
        let entries = header.map(|(_, entries)| entries).unwrap_or_default();
        for slot in used {
            let at = layout.header_bytes() + slot * layout.page_bytes as usize;
            let page = &self.spare[at..at + layout.page_bytes as usize];
            if let Some(entry) =
                entries.get(slot).filter(|entry| entry.id.checksum(page) == entry.checksum)
                && carried.len() < layout.slots as usize / 2
            {
                carried.push((entry.id, at));
            }
        }
        carried
    }

    /// Writes the file's head unless it is written.
    fn write_head(&mut self, shared: &TierShared) -> Result<(), i32> {
        if !self.has_head {
            // The head takes the header's part of `spare`; the pages to carry lie behind it.
            let block = &mut self.spare[..HEAD_BYTES as usize];
            shared.layout.write_head(block);
            write(shared.file.file(), block, 0)?;
            self.has_head = true;
        }
        Ok(())
    }

    fn write(&mut self, shared: &TierShared, buffer: &mut ChunkBuffer) -> bool {
        let TierShared { layout, index, file, counts, .. } = shared;
        let chunk = self.next;
        let len = layout.header_bytes() + buffer.entries.len() * layout.page_bytes as usize;
        layout.write_header(&mut buffer.memory, chunk, self.sequence, &buffer.entries);
        let written = self
            .write_head(shared)
            .and_then(|()| write(file.file(), &buffer.memory[..len], layout.chunk_offset(chunk)));
        self.sequence += 1;
        match written {
            Ok(()) => {
                DiskCounters::add(&counts.bytes_written, len as u64);
                index.insert(chunk, &buffer.entries);
                self.next = if chunk + 1 == layout.chunks { 0 } else { chunk + 1 };
                true
            }
            Err(errno) => {
                DiskCounters::add(&counts.errors, 1);
                DiskCounters::add(&counts.pages_dropped, buffer.entries.len() as u64);
                // disk.T6.
                let is_full = [ENOSPC, EDQUOT, EFBIG].contains(&errno);
                self.next = if is_full || chunk + 1 == layout.chunks { 0 } else { chunk + 1 };
                false
            }
        }
    }
}
