//! What a thread of the flusher does with the files, one after the other: takes one in hand, writes back what
//! is due, and puts it back on the list unless it owes nothing. The rules are those of
//! [`flusher`](crate::flush::flusher), which has the threads.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::cache::ledger::Share;
use crate::flush::owed::stream_pages;
use crate::flush::sync::sync_in_background;
use crate::flush::{BusyPages, flush, flush_some};
use crate::inode::{Blocking, CachedFile};
use crate::units::PageIndex;
use crate::writeback::flusher::{Flusher, Hand, ThreadId};
use crate::writeback::turns::STUCK_AFTER;

/// Threads at files of one device, which may hang as a whole. Chosen, not measured.
pub(super) const DEVICE_THREADS_MAX: usize = 4;

/// Files that the thread on duty is at work on in a round before others help. Chosen, not measured.
pub(super) const HELP_AFTER: usize = 4;
/// What a file owes at most that helpers write: a few transfers. Chosen, not measured.
const LITTLE_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Duty,
    Watch,
    Help,
}

/// What a device has left for one more thread.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Free,
    /// It serves another, or there was no time to see: to be asked again.
    Later,
    /// Until one of the others comes back, and tells.
    None,
}

/// What came up while the files were looked at.
pub(super) struct Round {
    role: Role,
    pub(super) starved: bool,
    /// Files that the thread was at work on.
    pub(super) works: usize,
    pub(super) worked: bool,
    pub(super) next: Option<Instant>,
    /// Of stuck files.
    pub(super) unwritten: u64,
    pub(super) unstable: u64,
}

impl Round {
    pub(super) fn new(role: Role) -> Round {
        let (starved, worked) = (false, false);
        Round { role, starved, works: 0, worked, next: None, unwritten: 0, unstable: 0 }
    }

    pub(super) fn note(&mut self, attended: Attended) {
        match attended {
            Attended::Worked => self.worked = true,
            Attended::Due(at) => self.next = Some(self.next.map_or(at, |next| next.min(at))),
            Attended::Idle => {}
        }
    }

    fn note_stuck(&mut self, share: &Share) {
        self.unwritten += share.unwritten();
        self.unstable += share.unstable();
    }
}

pub(super) enum Attended {
    Worked,
    Due(Instant),
    Idle,
}

/// One file after the other.
impl Flusher<CachedFile> {
    /// Takes the next file in hand, of `left` that are to be looked at, and what keeps it from being
    /// dropped if nobody has it open.
    pub(super) fn take(
        &self,
        me: ThreadId,
        round: &Round,
        left: &mut usize,
    ) -> Option<(Arc<CachedFile>, Option<Arc<CachedFile>>)> {
        let mut state = self.state();
        while *left > 0 && !state.stopped {
            *left -= 1;
            // Another thread that was on duty may have taken some of them.
            let next = state.queue.pop_front()?;
            let Some(file) = next.upgrade() else { continue };
            // Out of the strays before it is asked what it owes: a close from here on puts it there
            // again.
            let stray = state.strays.remove(&address(&file));
            state.hands.push(Hand {
                thread: me,
                helps: round.role == Role::Help,
                device: file.id.device,
                share: Arc::clone(&file.writeback.share),
                at_work: None,
                ended: file.writeback.share.ended(),
                ended_at: Instant::now(),
                syncs: false,
                lets_go: false,
            });
            return Some((file, stray));
        }
        None
    }

    /// From here on, the thread may have to wait for the device of the file that it has in hand (flusher.FL2).
    fn begin_work(self: &Arc<Self>, me: ThreadId) {
        let mut state = self.state();
        if let Some(hand) = state.hand(me)
            && hand.at_work.is_none()
        {
            let now = Instant::now();
            (hand.at_work, hand.ended_at) = (Some(now), now);
        }
        self.keep_watch(&mut state);
    }

    fn note_syncs(&self, me: ThreadId, syncs: bool) {
        let mut state = self.state();
        state.hand(me).expect("a file in hand").syncs = syncs;
        if state.hands_awaited > 0 {
            // Who closes it does not wait any longer.
            self.put_back.notify_all();
        }
    }

    /// Lists the file again unless it owes nothing, and lets go of it; whether the thread is still on
    /// duty.
    pub(super) fn put_back(
        self: &Arc<Self>,
        me: ThreadId,
        file: Arc<CachedFile>,
        stray: Option<Arc<CachedFile>>,
    ) -> bool {
        if let Some(stray) = stray {
            if file.owes() {
                self.state().strays.insert(address(&stray), stray);
            } else {
                // Cuts off space that was reserved.
                self.begin_work(me);
                file.rest();
            }
        }
        let mut is_listed = !try_unlist(&file);
        if !is_listed && self.state().strays.contains_key(&address(&file)) {
            // flusher.FL5: closed while it was in hand. The thread that put it there may have listed it.
            is_listed = !std::mem::replace(&mut file.writeback.state().listed, true);
        }
        let listed = is_listed.then(|| Weak::clone(&file.this));
        self.let_go(me, file);
        let mut state = self.state();
        state.hands.retain(|hand| hand.thread != me);
        state.queue.extend(listed);
        if state.hands_awaited > 0 {
            self.put_back.notify_all();
        }
        state.on_duty == Some(me)
    }

    /// Drops a file that the thread has in hand.
    fn let_go(self: &Arc<Self>, me: ThreadId, file: Arc<CachedFile>) {
        // Before: who opens it anew once it is gone, or another, may have to wait for its memory.
        if let Some(hand) = self.state().hand(me) {
            hand.lets_go = true;
        }
        if let Some(last) = Arc::into_inner(file) {
            self.begin_work(me);
            drop(last);
        }
    }

    /// Writes back what is due of a file.
    pub(super) fn attend(
        self: &Arc<Self>,
        me: ThreadId,
        file: &Arc<CachedFile>,
        stray: bool,
        round: &mut Round,
    ) -> Attended {
        let now = Instant::now();
        let ledger = &file.cache().ledger;
        // A sixteenth too early at most: an exact look would take back the reserves of all, for each file.
        let much = self.is_much(ledger.dirty_at_most());
        let state = file.writeback.state();
        let retry = state.retry.map(|(at, _)| at).filter(|&at| at > now);
        // Early enough that nothing stays for longer than it should.
        let due = state.dirty.since().map(|since| since + self.limits.age_max / 2);
        drop(state);
        let owes = file.writeback.generations.has_pages();
        if let (Some(at), Some(_)) = (retry, due) {
            round.note_stuck(&file.writeback.share);
            // Not later than what others dirty meanwhile is due.
            return Attended::Due(at.min(now + self.limits.age_max / 2));
        }
        let flushed = due.is_some_and(|at| at <= now || stray || round.starved);
        let (least, batch) = stream_pages(file);
        let is_behind = file.writeback.state().stream.is_due(least, batch);
        let some = due.is_some() && much;
        let asked =
            |flushed| (owes || flushed) && self.is_sync_due(ledger.unstable(), round.starved);
        if !(flushed || is_behind || some || asked(false)) {
            return due.map_or(Attended::Idle, Attended::Due);
        }
        let is_little = file.writeback.share.unwritten() <= LITTLE_BYTES;
        if round.role == Role::Help && !is_little {
            return Attended::Idle;
        }
        match self.place(me, file.id.device, round.role) {
            Place::Free => {}
            Place::Later => return Attended::Due(now + STUCK_AFTER / 2),
            Place::None => return Attended::Idle,
        }
        round.works += 1;
        if round.role == Role::Duty && round.works >= HELP_AFTER {
            self.call_help();
        }
        self.begin_work(me);
        let behind = file.writeback.state().stream.take(least, batch);
        if flushed {
            flush(file, PageIndex::FIRST, PageIndex::LAST, BusyPages::Skip, false);
        } else if let Some((first, last)) = behind {
            flush(file, first, last, BusyPages::Skip, false);
        }
        if asked(flushed) {
            self.note_syncs(me, true);
            sync_in_background(file, Blocking::Wait);
            self.note_syncs(me, false);
        }
        match due {
            Some(_) if flushed || behind.is_some() => Attended::Worked,
            Some(_) if much => match flush_some(file).pages {
                0 => Attended::Due(now + Duration::from_millis(2)),
                _ => Attended::Worked,
            },
            Some(at) => Attended::Due(at),
            None => Attended::Idle,
        }
    }

    /// Whether files are to be synced so that their pages can go.
    fn is_sync_due(&self, unstable_bytes: u64, starved: bool) -> bool {
        let stuck = self.stuck_unstable.load(Relaxed);
        let most = self.limits.unstable_bytes_max();
        let most = most.saturating_sub(stuck).max(most / 4);
        unstable_bytes > 0 && (starved || unstable_bytes.saturating_sub(stuck) > most)
    }

    /// Whether the thread may go to work on a file of `device`, where others may be already (flusher.FL4).
    fn place(&self, me: ThreadId, device: u64, role: Role) -> Place {
        let (mut others, mut moving, mut all, mut all_move) = (0, false, 0, true);
        for hand in self.state().hands.iter_mut() {
            if hand.thread != me && hand.device == device {
                let moves = hand.is_moving();
                all += 1;
                all_move &= moves;
                if !(hand.helps && moves) {
                    others += 1;
                    moving |= moves;
                }
            }
        }
        if role == Role::Help {
            // flusher.FL7
            return if all_move && all < DEVICE_THREADS_MAX { Place::Free } else { Place::Later };
        }
        match others {
            0 => Place::Free,
            DEVICE_THREADS_MAX.. => Place::None,
            _ if moving => Place::Later,
            _ => Place::Free,
        }
    }

    /// Notes what stuck files owe: those that were found to be, and what others have in hand.
    pub(super) fn note_stuck(&self, me: ThreadId, mut unwritten: u64, mut unstable: u64) {
        for hand in self.state().hands.iter_mut() {
            if hand.thread != me && !hand.is_moving() {
                unwritten += hand.share.unwritten();
                unstable += hand.share.unstable();
            }
        }
        self.stuck_unwritten.store(unwritten, Relaxed);
        self.stuck_unstable.store(unstable, Relaxed);
    }
}

/// Takes a file off the list if it owes nothing; whether it did (flusher.FL1).
fn try_unlist(file: &CachedFile) -> bool {
    let mut state = file.writeback.state();
    // What a flush has had written is in a generation before the flush ends.
    let is_settled = state.dirty.is_clean() && !file.writeback.generations.has_pages();
    if is_settled {
        state.listed = false;
    }
    is_settled
}

pub(super) fn address(file: &Arc<CachedFile>) -> usize {
    Arc::as_ptr(file).addr()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::writeback::Limits;
    use crate::{BackendChoice, Engine, Error, OpenOptions, WriteMode};

    fn hand_of(thread: ThreadId, device: u64, share: Arc<Share>) -> Hand {
        let (helps, syncs, lets_go) = (false, false, false);
        let (at_work, ended, ended_at) = (None, 0, Instant::now());
        Hand { thread, helps, share, device, at_work, ended, ended_at, syncs, lets_go }
    }

    /// Goal: a device where write-backs end has one thread at a time; where none does, a few.
    #[test]
    fn threads_of_one_device() {
        let limits = Limits::new(None, Duration::from_secs(30), 4 << 20);
        let flusher = Flusher::new(limits);
        let long_ago = Instant::now() - 2 * STUCK_AFTER;
        let add = |thread, device| {
            let hand = Hand { ended_at: long_ago, ..hand_of(thread, device, Arc::default()) };
            flusher.state().hands.push(hand);
        };
        let place = |thread, device| flusher.place(thread, device, Role::Duty);
        let may_help = || flusher.place(9, 7, Role::Help) == Place::Free;
        assert!(may_help());
        add(1, 7);
        assert_eq!(place(1, 7), Place::Free, "its own");
        assert_eq!(place(2, 7), Place::Free, "the other is stuck");
        assert!(!may_help(), "at a device that is stuck");
        flusher.state().hands[0].ended = 5;
        assert!(may_help(), "write-backs have ended since");
        add(2, 7);
        assert_eq!(place(3, 7), Place::Later, "write-backs have ended since");
        assert!(!may_help(), "one is stuck");
        assert_eq!(place(3, 8), Place::Free, "another device");
        flusher.state().hands.iter_mut().for_each(|hand| hand.helps = true);
        assert_eq!(place(3, 7), Place::Free, "the one that moves helps");
        flusher.state().hands[0].ended_at = long_ago;
        assert_eq!(place(3, 7), Place::Free);
        (3..=DEVICE_THREADS_MAX as u64).for_each(|thread| add(thread, 7));
        assert_eq!(place(9, 7), Place::None);
        assert_eq!(place(9, 8), Place::Free);
        let all_move = |hand: &mut Hand| (hand.helps, hand.ended_at) = (true, Instant::now());
        flusher.state().hands.iter_mut().for_each(all_move);
        assert_eq!(place(9, 7), Place::Free, "helpers are in nobody's way");
        assert!(!may_help(), "but in each other's");
        flusher.state().hands.pop();
        assert!(may_help());
    }

    /// Goal: an open for which there is no memory waits for that of a file that a thread of the flusher drops.
    /// Incident: where the cache had room for one file, and that had been closed, opening it anew failed now
    /// and then.
    #[test]
    fn an_open_waits_for_the_memory_of_what_is_let_go() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true);
        let open = || engine.open(dir.path().join("file"), &options);
        let (cache, flusher) = (&engine.shared().cache, &engine.shared().flusher);
        let mut taken = 0;
        for bytes in [1 << 16, 1 << 10, 1] {
            while cache.try_charge(bytes) {
                taken += bytes;
            }
        }
        assert!(matches!(open(), Err(Error::NoBuffers { .. })), "nobody lets go of anything");
        let hand = Hand { lets_go: true, ..hand_of(9, 7, Arc::default()) };
        flusher.state().hands.push(hand);
        std::thread::scope(|threads| {
            let opener = threads.spawn(open);
            while flusher.state().hands_awaited == 0 {
                assert!(!opener.is_finished(), "it does not wait");
                std::thread::yield_now();
            }
            cache.frames.uncharge(taken);
            flusher.state().hands.retain(|hand| hand.thread != 9);
            flusher.put_back.notify_all();
            opener.join().unwrap().expect("there is memory");
        });
    }

    /// Goal: a file is closed when its last handle has been dropped, although a thread of the flusher had it in hand.
    /// Incident: a program that was just written could not be executed, now and then (ETXTBSY).
    #[test]
    fn a_close_waits_until_the_file_is_out_of_hand() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = OpenOptions::new().create(true).write(true).write_mode(WriteMode::Back);
        let file = engine.open(dir.path().join("file"), &options).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let flusher = &engine.shared().flusher;
        let hand = hand_of(9, 7, Arc::clone(&file.cached().writeback.share));
        flusher.state().hands.push(hand);
        std::thread::scope(|threads| {
            let closer = threads.spawn(|| drop(file));
            while flusher.state().hands_awaited == 0 {
                assert!(!closer.is_finished(), "it does not wait");
                std::thread::yield_now();
            }
            flusher.state().hands.retain(|hand| hand.thread != 9);
            flusher.put_back.notify_all();
        });
    }
}
