//! Chooses the states to check: all, if they are few; otherwise a sample, by a seed.

use std::collections::HashSet;

use super::model::{Atoms, Lost};
use super::tree::Tree;

/// The state after a power cut that follows the first `cut` steps.
#[derive(Debug, Clone)]
pub struct State {
    pub cut: usize,
    pub lost: Lost,
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
pub struct SampleRandom(pub u64);

impl SampleRandom {
    pub fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % below as u64) as usize
    }

    fn shuffle<T>(&mut self, all: &mut [T]) {
        for at in (1..all.len()).rev() {
            all.swap(at, self.below(at + 1));
        }
    }
}

pub struct StateSet {
    pub states: Vec<State>,
    /// There are no other states.
    pub is_all: bool,
}

/// At most `most` states. No two of them look the same to a check, which also sees the program's output.
pub fn states(atoms: &Atoms, steps: usize, said: &[usize], most: usize, seed: u64) -> StateSet {
    let mut choice = Sampler { atoms, said, most, seen: HashSet::new(), states: Vec::new() };
    if let Some(all) = exhaustive(atoms, steps, most) {
        all.into_iter().for_each(|state| choice.add(state));
        return StateSet { states: choice.states, is_all: true };
    }
    let mut random = SampleRandom(seed);
    let mut cuts: Vec<usize> = (0..=steps).collect();
    random.shuffle(&mut cuts);
    // All changes, and only the synced changes.
    for &cut in &cuts {
        choice.add(State { cut, lost: Lost::new() });
        choice.add(State { cut, lost: atoms.losable(cut).into_iter().collect() });
    }
    // One change lost, or one change kept.
    let mut single: Vec<(usize, usize)> = Vec::new();
    for &cut in &cuts {
        single.extend(atoms.losable(cut).into_iter().map(|number| (cut, number)));
    }
    random.shuffle(&mut single);
    for (cut, number) in single {
        if choice.is_full() {
            break;
        }
        choice.add(State { cut, lost: atoms.with_dependents(Lost::from([number]), cut) });
        let kept = atoms.with_dependencies(number);
        let lost = atoms.losable(cut).into_iter().filter(|number| !kept.contains(number));
        choice.add(State { cut, lost: atoms.with_dependents(lost.collect(), cut) });
    }
    // Random subsets. After many duplicates in a row, there are no others, or they are rare.
    let mut futile = 0;
    while !choice.is_full() && futile < 1000 {
        let cut = random.below(steps + 1);
        let share = random.below(100);
        let lost = atoms.losable(cut).into_iter().filter(|_| random.below(100) < share);
        let lost = atoms.with_dependents(lost.collect(), cut);
        let before = choice.states.len();
        choice.add(State { cut, lost });
        futile = if choice.states.len() > before { 0 } else { futile + 1 };
    }
    StateSet { states: choice.states, is_all: false }
}

struct Sampler<'a> {
    atoms: &'a Atoms,
    said: &'a [usize],
    most: usize,
    seen: HashSet<(u64, usize)>,
    states: Vec<State>,
}

impl Sampler<'_> {
    fn is_full(&self) -> bool {
        self.states.len() >= self.most
    }

    fn add(&mut self, state: State) {
        if self.is_full() {
            return;
        }
        let tree: Tree = self.atoms.tree(state.cut, &state.lost);
        if self.seen.insert((tree.fingerprint(), self.said[state.cut])) {
            self.states.push(state);
        }
    }
}

/// All states, unless there are more than `most`, duplicates included.
fn exhaustive(atoms: &Atoms, steps: usize, most: usize) -> Option<Vec<State>> {
    let mut all = Vec::new();
    for cut in 0..=steps {
        let in_doubt = atoms.losable(cut);
        let mut sets = vec![Lost::new()];
        for number in in_doubt {
            let mut more = Vec::new();
            for lost in &mut sets {
                let must = atoms.all[number].needs.iter().any(|need| lost.contains(need));
                if must {
                    lost.insert(number);
                } else {
                    more.push(lost.iter().copied().chain([number]).collect());
                }
            }
            sets.extend(more);
            if all.len() + sets.len() > most {
                return None;
            }
        }
        all.extend(sets.into_iter().map(|lost| State { cut, lost }));
    }
    Some(all)
}
