//! The flusher: its threads write back when nobody asks for it, by age and by amount.
//!
//! A file that hangs (a dead server, a stuck device) keeps the thread that writes it back, maybe for
//! ever, and no other file is to wait for it. So one thread is *on duty*: it looks at the listed files one
//! by one, and sleeps when nothing is due. While it is at work on one and others are listed, a second one
//! *watches* it:
//!
//! ```text
//!   by the first DIRTY page             by who goes to work on a file, or lists one meanwhile (F3)
//!            |                                                  |
//!            v        begin_work                                v
//!         on duty <---------------> at work on a file         watch ----> ends: nobody is at work
//!          |   ^      put_back              |                   |
//!    sleep |   | told, due                  |      longer than STUCK_AFTER
//!          v   |                            |                   |
//!         asleep                            v                   v
//!                        put_back <---- stuck with it        on duty
//!                           |
//!                           v
//!                ends, or watches (F3)
//! ```
//!
//! - **F1** A file of which a page is DIRTY, or was and is under write-back or unsynced, is listed: it is in
//!   the queue once, or in a thread's hands. It leaves the list under the lock of its state, if that says
//!   that it owes nothing, and is listed by the next thread that dirties it. So no two threads work
//!   on one file, and the list is as long as there are files that owe something. (Closed ones leave
//!   it sooner or later.)
//! - **F2** The thread on duty waits for nothing but in its sleep, and when it is *at work*: it says so
//!   before it flushes or syncs, gives back space, or drops the last reference to a file, as that closes
//!   descriptors.
//! - **F3** While the thread on duty is at work and the queue is not empty there is a watch, if a thread is
//!   to be had. A thread that goes to work sees to it, and one that lists a file; and one that
//!   comes back from one, as the thread on duty may have got stuck when there were too many for a
//!   watch.
//! - **F4** At most [`THREADS_MAX`] threads, of which [`DEVICE_THREADS_MAX`] at files of one device: a
//!   server that died with many files has no more. Where write-backs of a device come to an end, however
//!   slowly, one thread at a time is at its files; where none has for [`STUCK_AFTER`], one more is.
//!   Helpers (F7) that move are not counted, else they would keep others from what is not for them.
//! - **F5** A file that nobody has open and that owes something is a *stray*: kept from being dropped, and
//!   listed. A thread takes it out of the strays before it asks what it owes, so that a close
//!   meanwhile makes it one again; and a thread that has taken a file off the list lists it if it
//!   is one by then.
//! - **F6** Nobody waits with a time limit but while something is owed, or for a moment as the watch.
//! - **F7** A device takes many writes at once, and a small file is one: of many, one after the other, it would
//!   have one at a time. So from the [`HELP_AFTER`]th file on that the thread on duty is at work on in a
//!   round, up to [`HELPERS_MAX`] *helpers* go through the list beside it. They are at files only that owe little
//!   ([`LITTLE_BYTES`]), so that there is still room for reads at the device, and only where all of the
//!   device's files in hand move. A helper ends when it has seen as many files as were listed, or [`IDLE_MAX`] in
//!   a row with which there was nothing to be done. It has no duty, and nobody waits for it: one that is stuck
//!   has a file in hand, and no more.
//!
//! *Out of reach.* Where [`DEVICE_THREADS_MAX`] files of one device hang, its other files are not written
//! back by age, and nor is any file where as many hang on each of several devices as there are threads.
//! Their syncs, last closes and writers over the limit write them back all the same.
//!
//! *Amounts* are of what is not stuck, failing or hung, against what that leaves of the limit: else a full
//! disk would have all other files written back at once, all the time.
//!
//! Locks: `state` is a leaf, and no file is dropped under it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::cache::ledger::Share;
use crate::flush::owed::stream_pages;
use crate::flush::sync::sync_in_background;
use crate::flush::{BusyPages, flush, flush_some};
use crate::inode::{Blocking, CachedFile};
use crate::thread::spawn;
use crate::units::PageIndex;
use crate::writeback::flusher::{Flusher, FlusherState, Hand, ThreadId};
use crate::writeback::turns::STUCK_AFTER;

/// How soon the flusher looks again after it found nothing to do, while there are writes. Chosen,
/// not measured.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// How often a watch looks: twice in [`STUCK_AFTER`].
const WATCH_PERIOD: Duration = Duration::from_millis(250);
/// With fewer files, it is not looked for those that are closed. Chosen, not measured.
const QUEUE_MAX_MIN: usize = 64;
/// Threads of one engine: so many files may hang before others wait for them. Chosen, not measured.
const THREADS_MAX: usize = 16;
/// Of these, those at files of one device, which may hang as a whole. Chosen, not measured.
const DEVICE_THREADS_MAX: usize = 4;

/// Files that the thread on duty is at work on in a round before others help. Chosen, not measured.
const HELP_AFTER: usize = 4;
/// With the thread on duty they are as many as may be at files of one device. Chosen, not measured.
const HELPERS_MAX: usize = DEVICE_THREADS_MAX - 1;
/// What a file owes at most that helpers write: a few transfers. Chosen, not measured.
const LITTLE_BYTES: u64 = 64 << 10;
/// Chosen, not measured.
const IDLE_MAX: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
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

/// The list.
impl Flusher<CachedFile> {
    /// Lists a file; its state says already that it is.
    pub(crate) fn add(self: &Arc<Self>, file: &CachedFile) {
        let mut state = self.state();
        if state.queue.len() >= state.queue_max {
            // The thread on duty may sleep for long, while files are opened and closed.
            state.queue.retain(|listed| listed.strong_count() > 0);
            state.queue_max = QUEUE_MAX_MIN.max(2 * state.queue.len());
        }
        state.queue.push_back(Weak::clone(&file.this));
        if state.on_duty.is_none() {
            // Where there is no thread to be had, writers do the work when the limit is reached.
            state.on_duty = self.spawn(&mut state, Role::Duty);
        }
        self.keep_watch(&mut state);
    }

    /// Keeps a file whose last handle is gone until it is written back.
    pub(crate) fn adopt(self: &Arc<Self>, file: Arc<CachedFile>) {
        // Before it is listed: the thread that takes it off the list looks whether it is a stray
        // (F5).
        let known = self.state().strays.insert(address(&file), Arc::clone(&file));
        if !std::mem::replace(&mut file.writeback.state().listed, true) {
            self.add(&file);
        }
        self.tell();
        drop(known);
    }
}

/// Threads, and what each does.
impl Flusher<CachedFile> {
    /// Starts a thread, if there may be one more and the system gives it; its number.
    fn spawn(
        self: &Arc<Self>,
        state: &mut FlusherState<CachedFile>,
        role: Role,
    ) -> Option<ThreadId> {
        if state.stopped || state.threads >= THREADS_MAX {
            return None;
        }
        state.last_thread += 1;
        let (flusher, me) = (Arc::clone(self), state.last_thread);
        spawn("millpond-flush", move || flusher.serve(me, role)).ok()?;
        state.threads += 1;
        Some(me)
    }

    /// Sees to it that somebody watches the one on duty, if there is anything to be done beside what it
    /// does (F3).
    fn keep_watch(self: &Arc<Self>, state: &mut FlusherState<CachedFile>) {
        if !state.has_watch && !state.queue.is_empty() && state.duty_at_work().is_some() {
            state.has_watch = self.spawn(state, Role::Watch).is_some();
        }
    }

    fn serve(self: &Arc<Self>, me: ThreadId, mut role: Role) {
        loop {
            let goes_on = match role {
                Role::Duty => self.serve_on_duty(me),
                Role::Watch => self.watch(me),
                Role::Help => {
                    self.help(me);
                    None
                }
            };
            match goes_on {
                Some(next) => role = next,
                None => return,
            }
        }
    }

    /// Watches the thread on duty, and takes over from it when it is stuck. `None`: the thread ends.
    fn watch(&self, me: ThreadId) -> Option<Role> {
        let mut state = self.state();
        loop {
            let waited = self.watching.wait_timeout_while(state, WATCH_PERIOD, |it| !it.stopped);
            state = waited.expect("no panic under the lock").0;
            let since = state.duty_at_work();
            match since {
                Some(since) if !state.stopped => {
                    if since.elapsed() >= STUCK_AFTER {
                        (state.on_duty, state.has_watch) = (Some(me), false);
                        return Some(Role::Duty);
                    }
                }
                _ => {
                    state.has_watch = false;
                    state.threads -= 1;
                    return None;
                }
            }
        }
    }

    /// Looks at all files, and sleeps, until somebody else is on duty, or there is nothing left to be on
    /// duty for. `None`: the thread ends.
    fn serve_on_duty(self: &Arc<Self>, me: ThreadId) -> Option<Role> {
        while self.make_round(me) {}
        let mut state = self.state();
        // F3: the one on duty may have got stuck when there was no thread for a watch.
        if !state.has_watch && state.duty_at_work().is_some() {
            state.has_watch = true;
            return Some(Role::Watch);
        }
        state.threads -= 1;
        None
    }

    /// Looks at each file once, and sleeps if there is nothing to do then; whether the thread is still
    /// on duty.
    fn make_round(self: &Arc<Self>, me: ThreadId) -> bool {
        let mut state = self.state();
        if state.stopped {
            return false;
        }
        state.told = false;
        self.told.clear();
        let mut left = state.queue.len();
        drop(state);
        let mut round = Round::new(Role::Duty);
        round.starved = self.starved.swap(false, Relaxed);
        while let Some((file, stray)) = self.take(me, &round, &mut left) {
            let attended = self.attend(me, &file, stray.is_some(), &mut round);
            round.note(attended);
            if !self.put_back(me, file, stray) {
                self.tell_of_unseen();
                return false;
            }
        }
        self.note_stuck(me, round.unwritten, round.unstable);
        if !round.worked {
            self.sleep(round.next);
        }
        true
    }

    /// Looks at the files as a helper (F7).
    fn help(self: &Arc<Self>, me: ThreadId) {
        let mut left = self.state().queue.len();
        let mut round = Round::new(Role::Help);
        let mut idle = 0;
        while idle < IDLE_MAX
            && let Some((file, stray)) = self.take(me, &round, &mut left)
        {
            let works = round.works;
            self.attend(me, &file, stray.is_some(), &mut round);
            idle = if round.works > works { 0 } else { idle + 1 };
            self.put_back(me, file, stray);
        }
        let mut state = self.state();
        state.helpers -= 1;
        state.threads -= 1;
        drop(state);
        self.tell_of_unseen();
    }

    /// Files were in the hands of a thread that is not on duty: the one that is has not seen them in its
    /// round.
    fn tell_of_unseen(&self) {
        let mut state = self.state();
        if !state.told {
            state.told = true;
            self.work.notify_one();
        }
    }

    fn sleep(&self, next: Option<Instant>) {
        let mut state = self.state();
        if state.told || state.stopped {
            return;
        }
        let wait = match next {
            Some(at) => at.saturating_duration_since(Instant::now()),
            // bell.BL1: the look comes with the next round.
            None if self.awake.clear() => {
                // Something was dirtied since the last look, maybe after it, and maybe written back
                // by a sync already: a program that does that a thousand times a second does not
                // wake us.
                LOOK_AGAIN.min(self.limits.age_max / 4)
            }
            None => {
                while !state.told && !state.stopped {
                    state = self.work.wait(state).expect("no panic under the lock");
                }
                return;
            }
        };
        drop(self.work.wait_timeout(state, wait).expect("no panic under the lock"));
    }
}

/// What came up while the files were looked at.
struct Round {
    role: Role,
    starved: bool,
    /// Files that the thread was at work on.
    works: usize,
    worked: bool,
    next: Option<Instant>,
    /// Of stuck files.
    unwritten: u64,
    unstable: u64,
}

impl Round {
    fn new(role: Role) -> Round {
        let (starved, worked) = (false, false);
        Round { role, starved, works: 0, worked, next: None, unwritten: 0, unstable: 0 }
    }

    fn note(&mut self, attended: Attended) {
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

enum Attended {
    Worked,
    Due(Instant),
    Idle,
}

/// One file after the other.
impl Flusher<CachedFile> {
    /// Takes the next file in hand, of `left` that are to be looked at, and what keeps it from being
    /// dropped if nobody has it open.
    fn take(
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
            });
            return Some((file, stray));
        }
        None
    }

    /// From here on, the thread may have to wait for the device of the file that it has in hand (F2).
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

    /// Lists the file again unless it owes nothing, and lets go of it; whether the thread is still on
    /// duty.
    fn put_back(
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
            // F5: closed while it was in hand. The thread that put it there may have listed it.
            is_listed = !std::mem::replace(&mut file.writeback.state().listed, true);
        }
        let listed = is_listed.then(|| Weak::clone(&file.this));
        self.let_go(me, file);
        let mut state = self.state();
        state.hands.retain(|hand| hand.thread != me);
        state.queue.extend(listed);
        state.on_duty == Some(me)
    }

    /// Drops a file that the thread has in hand.
    fn let_go(self: &Arc<Self>, me: ThreadId, file: Arc<CachedFile>) {
        if let Some(last) = Arc::into_inner(file) {
            self.begin_work(me);
            drop(last);
        }
    }

    /// Writes back what is due of a file.
    fn attend(
        self: &Arc<Self>,
        me: ThreadId,
        file: &Arc<CachedFile>,
        stray: bool,
        round: &mut Round,
    ) -> Attended {
        let now = Instant::now();
        let ledger = &file.cache().ledger;
        let much = self.is_much(ledger.dirty());
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
            sync_in_background(file, Blocking::Wait);
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

    /// Starts a helper, if there may be one more (F7). It leaves threads to those that get stuck.
    fn call_help(self: &Arc<Self>) {
        let mut state = self.state();
        let is_room = state.threads + DEVICE_THREADS_MAX < THREADS_MAX;
        if is_room && state.helpers < HELPERS_MAX && state.queue.len() >= HELP_AFTER {
            let is_there = self.spawn(&mut state, Role::Help).is_some();
            state.helpers += usize::from(is_there);
        }
    }

    /// Whether the thread may go to work on a file of `device`, where others may be already (F4).
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
            // F7
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
    fn note_stuck(&self, me: ThreadId, mut unwritten: u64, mut unstable: u64) {
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

/// Takes a file off the list if it owes nothing; whether it did (F1).
fn try_unlist(file: &CachedFile) -> bool {
    let mut state = file.writeback.state();
    // What a flush has had written is in a generation before the flush ends.
    let is_settled = state.dirty.is_clean() && !file.writeback.generations.has_pages();
    if is_settled {
        state.listed = false;
    }
    is_settled
}

fn address(file: &Arc<CachedFile>) -> usize {
    Arc::as_ptr(file).addr()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::tests::slow::{Kind, Slow};
    use crate::writeback::Limits;
    use crate::{BackendChoice, Engine, File, OpenOptions, WriteMode};

    /// Goal: a device where write-backs end has one thread at a time; where none does, a few.
    #[test]
    fn threads_of_one_device() {
        let limits = Limits::new(None, Duration::from_secs(30), 4 << 20);
        let flusher = Flusher::new(limits);
        let long_ago = Instant::now() - 2 * STUCK_AFTER;
        let add = |thread, device| {
            let share = Arc::default();
            let (at_work, ended, ended_at) = (None, 0, long_ago);
            let hand = Hand { thread, helps: false, share, device, at_work, ended, ended_at };
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

    /// Goal: many small files are written back by several threads (F7).
    /// Method: their write-backs are held up, and go on one at a time as long as there is one.
    #[test]
    fn small_files_are_written_back_by_several_threads() {
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(8 << 20);
        let engine = engine.dirty_age_max(Duration::from_millis(20)).build().unwrap();
        let options = OpenOptions::new().read(true).write(true).write_mode(WriteMode::Back);
        let files: Vec<_> = (0..100)
            .map(|_| {
                let slow = Slow::new(vec![0; 4096], Duration::ZERO);
                slow.reserve();
                slow.hold(Kind::Write, true);
                let file = CachedFile::on(engine.shared(), slow.clone(), &options).unwrap();
                (slow, File::new(file, None, &options))
            })
            .collect();
        files.iter().for_each(|(_, file)| file.write_all_at(&[1; 4096], 0).unwrap());
        let held = || files.iter().map(|(slow, _)| slow).filter(|slow| slow.now(Kind::Write) > 0);
        let mut ended = 0;
        while held().count() <= HELPERS_MAX {
            if let Some(slow) = held().next() {
                slow.let_one_go_on(Kind::Write);
                while slow.now(Kind::Write) > 0 {
                    std::thread::yield_now();
                }
                ended += 1;
            }
            assert!(ended < files.len(), "one at a time");
            // For others to come, and shorter than what counts as stuck.
            std::thread::sleep(STUCK_AFTER / 25);
        }
        assert!(engine.shared().flusher.state().helpers > 0, "the device was taken to be stuck");
        files.iter().for_each(|(slow, _)| slow.hold(Kind::Write, false));
        files.iter().for_each(|(slow, file)| {
            file.sync_all().unwrap();
            assert_eq!(slow.contents(), [1; 4096]);
        });
        while engine.shared().flusher.state().helpers > 0 {
            std::thread::yield_now();
        }
    }

    /// Goal: files leave the list when they owe nothing, and closed ones do while the thread sleeps.
    /// Incident: they stayed until they were closed, and each that came looked through all of them.
    #[test]
    fn files_leave_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::builder().backend(BackendChoice::Memory).cache_bytes(4 << 20);
        let engine = engine.build().unwrap();
        let options = OpenOptions::new().read(true).write(true).create(true);
        let options = options.write_mode(WriteMode::Back);
        let open = |number: usize| engine.open(dir.path().join(number.to_string()), &options);
        let listed = || {
            let state = engine.shared().flusher.state();
            state.queue.len() + state.hands.len()
        };
        let files: Vec<_> = (0..100).map(|number| open(number).unwrap()).collect();
        files.iter().for_each(|file| file.write_all_at(&[1; 100], 0).unwrap());
        assert_eq!(listed(), 100);
        files.iter().for_each(|file| file.sync_all().unwrap());
        let started = Instant::now();
        while listed() > 0 {
            assert!(started.elapsed() < Duration::from_secs(30), "{} files are listed", listed());
            // It may sleep until those are due that were dirty when it looked.
            engine.shared().flusher.tell();
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut others = 0;
        files[0].write_all_at(&[2; 100], 0).unwrap();
        for _ in 0..1000 {
            open(100).unwrap().write_all_at(&[1; 100], 0).unwrap();
            others = others.max(listed());
        }
        assert!(others <= 2 * files.len() + 1, "{others} files are listed");
    }
}
