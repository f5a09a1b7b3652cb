//! Where contexts of Linux AIO are found by their handles, without a lock: A4 of `aio`.
//!
//! ```text
//!   find:   users += 1 -> the handle stands? -> in use -> drop: users -= 1
//!   remove: in use -> the handle is 0 -> drop
//!   free:   the handle is 0 -> users is 0 -> the place is empty
//! ```
//!
//! - **U1** Who wants to use a context counts himself, and then looks whether the handle stands.
//! - **U2** Who takes the handle away is counted, and stays so until after. In the order of the changes of
//!   `users`, who counts himself later than that one's going acquires it, and so finds the handle
//!   gone; who does so earlier is seen by whoever sees that one gone.
//! - **U3** Who frees a context has acquired the end of its handle, so that he sees the count of who took it
//!   away, or his going; and then the end of each use.
//!
//! Locks: who makes or destroys a context holds one, a leaf.

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::sync::{AtomicPtr, AtomicU32, AtomicUsize, Lock};

/// Places of so many contexts.
pub struct Places<T, const COUNT: usize> {
    places: [Place<T>; COUNT],
    /// One more than the highest place ever used.
    used: AtomicUsize,
    /// Held by who makes or destroys a context.
    making: Lock<()>,
}

/// Where a context can be found.
struct Place<T> {
    /// 0 where there is none, or none any more.
    handle: AtomicUsize,
    users: AtomicU32,
    context: AtomicPtr<T>,
}

/// A context that lives as long as this does.
pub struct InUse<'a, T> {
    place: &'a Place<T>,
}

impl<T: Send + Sync, const COUNT: usize> Places<T, COUNT> {
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        let places = [const {
            Place {
                handle: AtomicUsize::new(0),
                users: AtomicU32::new(0),
                context: AtomicPtr::new(null_mut()),
            }
        }; COUNT];
        Self { places, used: AtomicUsize::new(0), making: Lock::new(()) }
    }

    fn used(&self) -> &[Place<T>] {
        // Relaxed: who knows a handle has been told of it, and so of this.
        &self.places[..self.used.load(Relaxed)]
    }

    /// The context of a handle.
    pub fn find(&self, handle: usize) -> Option<InUse<'_, T>> {
        self.used()
            .iter()
            .filter(|place| place.handle.load(Relaxed) == handle)
            .find_map(|place| InUse::of(place, handle))
    }

    /// Puts a context where it can be found; its handle, or `None` if there are too many.
    pub fn place(&self, handle: usize, context: T) -> Option<usize> {
        let _making = self.making.lock();
        self.free_all();
        let at = self.places.iter().position(|place| place.context.load(Relaxed).is_null())?;
        self.used.fetch_max(at + 1, Relaxed);
        self.places[at].fill(handle, Box::into_raw(Box::new(context)));
        Some(handle)
    }

    /// Frees the contexts that were removed, and are not used any more.
    pub fn free_removed(&self) {
        let _making = self.making.lock();
        self.free_all();
    }

    /// `making` is held.
    fn free_all(&self) {
        for place in self.used() {
            let context = place.take_unused();
            if !context.is_null() {
                // SAFETY: made by `Box::into_raw`, and nobody finds or uses it.
                drop(unsafe { Box::from_raw(context) });
            }
        }
    }

    /// In a forked child: the contexts are the parent's, and left behind.
    ///
    /// # Safety
    ///
    /// No other thread exists.
    pub unsafe fn after_fork(&self) {
        // SAFETY: the caller's duty.
        unsafe { self.making.reset(()) };
        for place in &self.places[..self.used.swap(0, Relaxed)] {
            place.handle.store(0, Relaxed);
            place.users.store(0, Relaxed);
            place.context.store(null_mut(), Relaxed);
        }
    }
}

impl<T> Place<T> {
    fn fill(&self, handle: usize, context: *mut T) {
        self.context.store(context, Relaxed);
        // Release: who finds the handle finds the context.
        self.handle.store(handle, Release);
    }

    /// Empties it if its context was removed and is not used; null if not.
    fn take_unused(&self) -> *mut T {
        let context = self.context.load(Relaxed);
        // Acquire: pairs with the Release in `remove` (U3).
        if context.is_null() || self.handle.load(Acquire) != 0 {
            return null_mut();
        }
        // Acquire: pairs with the Release of each who used it.
        if self.users.load(Acquire) != 0 {
            return null_mut();
        }
        self.context.store(null_mut(), Relaxed);
        context
    }
}

impl<'a, T> InUse<'a, T> {
    fn of(place: &'a Place<T>, handle: usize) -> Option<Self> {
        // Acquire: pairs with the Release of who took the handle away, and has gone (U2).
        place.users.fetch_add(1, Acquire);
        let in_use = Self { place };
        // Acquire: pairs with the Release in `fill`.
        (place.handle.load(Acquire) == handle).then_some(in_use)
    }

    /// Takes the handle away from its context; whether it had it still. From then on nobody finds it.
    pub fn remove(&self, handle: usize) -> bool {
        // Release: who finds it gone sees that this one is counted (U3).
        self.place.handle.compare_exchange(handle, 0, Release, Relaxed).is_ok()
    }
}

impl<T> Clone for InUse<'_, T> {
    fn clone(&self) -> Self {
        // Relaxed: it is counted already.
        self.place.users.fetch_add(1, Relaxed);
        Self { place: self.place }
    }
}

impl<T> Deref for InUse<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // Relaxed: the handle was found.
        // SAFETY: A4: counted while the handle stood.
        unsafe { &*self.place.context.load(Relaxed) }
    }
}

impl<T> Drop for InUse<'_, T> {
    fn drop(&mut self) {
        // Release: all that was done with the context comes before it is freed; and pairs with the Acquire
        // in `of` (U2).
        self.place.users.fetch_sub(1, Release);
    }
}

/// Loom models, in `tests/loom.rs`; the `loom_places_without_*` twins leave one rule out and must fail.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;
    use std::sync::atomic::Ordering;

    use super::*;

    const HANDLE: usize = 1;
    const OTHER: usize = 2;

    /// Whether a context was freed. Loom reports a look at it while that happens, or which it is not seen
    /// to come after.
    type Freed = Arc<UnsafeCell<bool>>;

    struct Context {
        handle: usize,
        freed: Freed,
    }

    // SAFETY: loom checks who looks at the cell.
    unsafe impl Send for Context {}
    // SAFETY: as above.
    unsafe impl Sync for Context {}

    impl Drop for Context {
        fn drop(&mut self) {
            // SAFETY: loom checks it.
            self.freed.with_mut(|freed| unsafe { *freed = true });
        }
    }

    type Model = Places<Context, 2>;

    /// With one context.
    fn model() -> (Arc<Model>, Freed) {
        let place = || Place {
            handle: AtomicUsize::new(0),
            users: AtomicU32::new(0),
            context: AtomicPtr::new(null_mut()),
        };
        let places = std::array::from_fn(|_| place());
        let places = Places { places, used: AtomicUsize::new(0), making: Lock::new(()) };
        let freed = Arc::new(UnsafeCell::new(false));
        let context = Context { handle: HANDLE, freed: Arc::clone(&freed) };
        assert_eq!(places.place(HANDLE, context), Some(HANDLE));
        (Arc::new(places), freed)
    }

    fn explore(body: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(body);
    }

    fn spawn<R: 'static>(
        places: &Arc<Model>,
        body: impl FnOnce(&Model) -> R + 'static,
    ) -> thread::JoinHandle<R> {
        let places = Arc::clone(places);
        thread::spawn(move || body(&places))
    }

    /// As `aio::destroy`; whether this thread did it.
    fn destroy(places: &Model, handle: usize) -> bool {
        let Some(context) = places.find(handle) else { return false };
        let removed = context.remove(handle);
        drop(context);
        places.free_removed();
        removed
    }

    fn find(places: &Model) -> Option<InUse<'_, Context>> {
        places.find(HANDLE)
    }

    /// Notes a use: not through the context, as in a twin there may be none.
    fn look(freed: &Freed) {
        // SAFETY: loom checks it.
        assert!(!freed.with(|freed| unsafe { *freed }), "used and freed");
    }

    fn free(take_unused: fn(&Place<Context>) -> *mut Context, places: &Model) {
        let _making = places.making.lock();
        let context = take_unused(&places.places[0]);
        if !context.is_null() {
            // SAFETY: as in `free_all`; in a twin loom reports it first.
            drop(unsafe { Box::from_raw(context) });
        }
    }

    /// One uses a context, a second one destroys it, and a third frees what was destroyed.
    #[derive(Clone, Copy)]
    struct Steps {
        find: fn(&Model) -> Option<InUse<'_, Context>>,
        remove: fn(InUse<'_, Context>, &Freed),
        go: fn(InUse<'_, Context>),
        take_unused: fn(&Place<Context>) -> *mut Context,
    }

    const STEPS: Steps = Steps {
        find,
        remove: |context, freed| {
            assert!(context.remove(HANDLE));
            look(freed);
        },
        go: |context| assert_eq!(context.handle, HANDLE),
        take_unused: Place::take_unused,
    };

    fn a_user_meets_the_end(steps: Steps) {
        explore(move || {
            let (places, freed) = model();
            let user = spawn(&places, {
                let freed = Arc::clone(&freed);
                move |places| {
                    if let Some(context) = (steps.find)(places) {
                        look(&freed);
                        (steps.go)(context);
                    }
                }
            });
            let other = spawn(&places, move |places| free(steps.take_unused, places));
            (steps.remove)(places.find(HANDLE).unwrap(), &freed);
            free(steps.take_unused, &places);
            user.join().unwrap();
            other.join().unwrap();
            places.free_removed();
            // SAFETY: loom checks it.
            assert!(freed.with(|freed| unsafe { *freed }), "never freed");
        });
    }

    /// Goal: a context that is destroyed while somebody finds it is not freed before all are done with it,
    /// and what they did with it comes before (A4).
    #[test]
    fn loom_places_a_user_meets_the_end() {
        a_user_meets_the_end(STEPS);
    }

    fn counted(place: &Place<Context>, ordering: Ordering) -> InUse<'_, Context> {
        place.users.fetch_add(1, ordering);
        InUse { place }
    }

    /// U1.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_a_look_after_counting_it_is_used_and_freed() {
        fn find(places: &Model) -> Option<InUse<'_, Context>> {
            let place = &places.places[0];
            (place.handle.load(Acquire) == HANDLE).then(|| counted(place, Acquire))
        }
        a_user_meets_the_end(Steps { find, ..STEPS });
    }

    /// U2.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_acquire_of_the_count_it_is_used_and_freed() {
        fn find(places: &Model) -> Option<InUse<'_, Context>> {
            let place = &places.places[0];
            let in_use = counted(place, Relaxed);
            (place.handle.load(Acquire) == HANDLE).then_some(in_use)
        }
        a_user_meets_the_end(Steps { find, ..STEPS });
    }

    /// U2: as it goes before.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_the_count_of_who_removes_it_is_used_and_freed() {
        let remove = |context: InUse<'_, Context>, _: &Freed| {
            let place = context.place;
            drop(context);
            place.handle.store(0, Release);
        };
        a_user_meets_the_end(Steps { remove, ..STEPS });
    }

    /// U2.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_release_of_the_count_of_who_removes_it_is_used_and_freed() {
        let remove = |context: InUse<'_, Context>, _: &Freed| {
            assert!(context.remove(HANDLE));
            context.place.users.fetch_sub(1, Relaxed);
            std::mem::forget(context);
        };
        a_user_meets_the_end(Steps { remove, ..STEPS });
    }

    /// U3.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_release_of_the_handle_who_removes_it_uses_it_on() {
        let remove = |context: InUse<'_, Context>, freed: &Freed| {
            let _ = context.place.handle.compare_exchange(HANDLE, 0, Relaxed, Relaxed);
            look(freed);
        };
        a_user_meets_the_end(Steps { remove, ..STEPS });
    }

    /// `take_unused` with other orderings.
    fn take(place: &Place<Context>, handle: Ordering, users: Ordering) -> *mut Context {
        match place.handle.load(handle) == 0 && place.users.load(users) == 0 {
            true => place.context.swap(null_mut(), Relaxed),
            false => null_mut(),
        }
    }

    /// U3.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_acquire_of_the_handle_who_removes_it_uses_it_on() {
        let take_unused = |place: &Place<Context>| take(place, Relaxed, Acquire);
        a_user_meets_the_end(Steps { take_unused, ..STEPS });
    }

    /// U3.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_acquire_of_the_last_use_it_is_freed_too_early() {
        let take_unused = |place: &Place<Context>| take(place, Acquire, Relaxed);
        a_user_meets_the_end(Steps { take_unused, ..STEPS });
    }

    /// U3.
    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_places_without_release_of_the_last_use_it_is_freed_too_early() {
        let go = |context: InUse<'_, Context>| {
            context.place.users.fetch_sub(1, Relaxed);
            std::mem::forget(context);
        };
        a_user_meets_the_end(Steps { go, ..STEPS });
    }

    /// A context is found by who was not told of it, which happens where a program guesses a handle.
    fn a_context_is_found_at_once(
        fill: fn(&Place<Context>, usize, *mut Context),
        find: fn(&Model) -> Option<InUse<'_, Context>>,
    ) {
        explore(move || {
            let (places, freed) = model();
            // All places are in use, as far as those are concerned who look.
            places.used.store(2, Relaxed);
            let finder = spawn(&places, move |places| {
                let context = find(places)?;
                let found = context.place.context.load(Relaxed);
                assert!(!found.is_null(), "no context");
                assert_eq!(context.handle, OTHER);
                Some(())
            });
            let context = Box::new(Context { handle: OTHER, freed: Arc::clone(&freed) });
            fill(&places.places[1], OTHER, Box::into_raw(context));
            finder.join().unwrap();
            for handle in [HANDLE, OTHER] {
                assert!(destroy(&places, handle));
            }
        });
    }

    /// Goal: who finds a handle finds its context.
    #[test]
    fn loom_places_a_context_is_found_at_once() {
        a_context_is_found_at_once(Place::fill, |places| places.find(OTHER));
    }

    #[test]
    #[should_panic(expected = "no context")]
    fn loom_places_without_release_of_the_handle_there_is_no_context() {
        let fill = |place: &Place<Context>, handle, context| {
            place.context.store(context, Relaxed);
            place.handle.store(handle, Relaxed);
        };
        a_context_is_found_at_once(fill, |places| places.find(OTHER));
    }

    #[test]
    #[should_panic(expected = "no context")]
    fn loom_places_without_acquire_of_the_handle_there_is_no_context() {
        fn find(places: &Model) -> Option<InUse<'_, Context>> {
            let in_use = counted(&places.places[1], Acquire);
            (in_use.place.handle.load(Relaxed) == OTHER).then_some(in_use)
        }
        a_context_is_found_at_once(Place::fill, find);
    }

    #[test]
    #[should_panic(expected = "no context")]
    fn loom_places_without_the_context_before_its_handle_there_is_none() {
        let fill = |place: &Place<Context>, handle, context| {
            place.handle.store(handle, Release);
            place.context.store(context, Relaxed);
        };
        a_context_is_found_at_once(fill, |places| places.find(OTHER));
    }

    /// Two destroy one context.
    fn two_destroy_it(remove: fn(&InUse<'_, Context>) -> bool) {
        explore(move || {
            let (places, freed) = model();
            let destroy = move |places: &Model| {
                let removed = places.find(HANDLE).is_some_and(|context| remove(&context));
                places.free_removed();
                removed
            };
            let other = spawn(&places, destroy);
            let mine = destroy(&places);
            let theirs = other.join().unwrap();
            assert!(mine != theirs, "not by one");
            // SAFETY: loom checks it.
            assert!(freed.with(|freed| unsafe { *freed }), "never freed");
        });
    }

    /// Goal: of two who destroy a context, one does, and it is freed once.
    #[test]
    fn loom_places_two_destroy_it() {
        two_destroy_it(|context| context.remove(HANDLE));
    }

    #[test]
    #[should_panic(expected = "not by one")]
    fn loom_places_without_one_exchange_two_destroy_it() {
        two_destroy_it(|context| {
            let stands = context.place.handle.load(Acquire) == HANDLE;
            context.place.handle.store(0, Release);
            stands
        });
    }

    /// Two look for contexts to free, when one was removed.
    fn two_free_it(locks: bool) {
        explore(move || {
            let (places, _) = model();
            places.find(HANDLE).unwrap().remove(HANDLE);
            let take = move |places: &Model| {
                let _making = locks.then(|| places.making.lock());
                places.places[0].take_unused().expose_provenance()
            };
            let other = spawn(&places, take);
            let mine = take(&places);
            let theirs = other.join().unwrap();
            assert!((mine == 0) != (theirs == 0), "not by one");
            let context = std::ptr::with_exposed_provenance_mut::<Context>(mine.max(theirs));
            // SAFETY: as in `free_all`.
            drop(unsafe { Box::from_raw(context) });
        });
    }

    /// Goal: of two who free contexts, one frees it.
    #[test]
    fn loom_places_two_free_it() {
        two_free_it(true);
    }

    #[test]
    #[should_panic(expected = "not by one")]
    fn loom_places_without_the_lock_two_free_it() {
        two_free_it(false);
    }

    /// A place gets another context while somebody looks for the first.
    fn a_place_is_used_again(find: fn(&Model) -> Option<InUse<'_, Context>>) {
        explore(move || {
            let (places, freed) = model();
            let finder = spawn(&places, move |places| {
                let Some(context) = find(places) else { return };
                let found = context.place.handle.load(Relaxed);
                assert_ne!(found, OTHER, "another's");
            });
            assert!(destroy(&places, HANDLE));
            let context = Context { handle: OTHER, freed: Arc::new(UnsafeCell::new(false)) };
            assert_eq!(places.place(OTHER, context), Some(OTHER));
            finder.join().unwrap();
            assert!(destroy(&places, OTHER));
            // SAFETY: loom checks it.
            assert!(freed.with(|freed| unsafe { *freed }), "never freed");
        });
    }

    /// Goal: who looks for a context does not find the one that is there later.
    #[test]
    fn loom_places_a_place_is_used_again() {
        a_place_is_used_again(find);
    }

    #[test]
    #[should_panic(expected = "another's")]
    fn loom_places_without_a_look_after_counting_another_is_found() {
        a_place_is_used_again(|places| {
            let place = &places.places[0];
            (place.handle.load(Acquire) == HANDLE).then(|| counted(place, Acquire))
        });
    }
}
