//! How the binding takes its locks, small enough that a scheduler can try the ways in which threads interleave.
//!
//! The binding has an interpreter that one thread at a time is attached to, and a lock for each ledger, sequence, block allocator
//! and index. Its rules, as `rust/kvtrie-py/src/{lib,detach,ledger}.rs` keep them:
//!
//! 1. The order is the ledger, a sequence, the allocator, the index. `step` takes its sequences one at a time.
//! 2. An attached thread waits for no lock: it tries, and lets go of the interpreter while it waits.
//! 3. A call that panics while it holds a lock poisons it: whoever takes it later gets an error and sees nothing.
//!
//! [`run`] makes calls in several threads, and panics where a thread sees what no finished call has left. The scheduler finds
//! deadlocks. Each [`Twin`] breaks one rule, and the test fails unless that is detected.
//!
//! It is a model: it has the order of locks and what happens between them, not the code. Each lock guards a number.

use shuttle::sync::{Arc, Mutex, MutexGuard};
use shuttle::thread;

/// Which rule is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twin {
    /// None: as the binding does it.
    Faithful,
    /// A commit takes the index before the sequence.
    IndexBeforeSequence,
    /// A plan waits for its sequence while it is attached to the interpreter.
    WaitsAttached,
    /// A poisoned lock is taken as if nothing had happened.
    IgnoresPoison,
    /// A step reads the ledger under one lock, and writes it under another.
    LetsGoOfTheLedger,
}

/// A call found a poisoned lock.
#[derive(Debug)]
struct Poisoned;

const SEQUENCES: usize = 2;
const BLOCKS: usize = 4;

/// What a lock guards, and whether a call panicked while it held it.
#[derive(Default)]
struct Guarded<T> {
    poisoned: bool,
    value: T,
}

struct Lock<T>(Mutex<Guarded<T>>);

type Guard<'a, T> = MutexGuard<'a, Guarded<T>>;

impl<T> Lock<T> {
    fn new(value: T) -> Self {
        let poisoned = false;
        Self(Mutex::new(Guarded { poisoned, value }))
    }

    fn wait(&self) -> Guard<'_, T> {
        self.0.lock().expect("the model itself does not panic")
    }
}

/// What a request has, as the ledger knows it.
#[derive(Default)]
struct Ledger {
    num_final: [usize; SEQUENCES],
    /// Blocks that requests hold.
    held: usize,
}

struct World {
    twin: Twin,
    interpreter: Mutex<()>,
    ledger: Lock<Ledger>,
    /// Their lengths.
    sequences: [Lock<usize>; SEQUENCES],
    /// Free blocks.
    allocator: Lock<usize>,
    /// Indexed blocks; twice, and both are the same whenever no call is under way.
    index: Lock<(usize, usize)>,
}

/// Takes locks for a thread that may be attached.
struct Keys<'a> {
    world: &'a World,
    attached: std::cell::RefCell<Option<MutexGuard<'a, ()>>>,
}

impl<'a> Keys<'a> {
    fn lock<T>(&self, lock: &'a Lock<T>) -> Result<Guard<'a, T>, Poisoned> {
        let is_attached = self.attached.borrow().is_some();
        let guard = match lock.0.try_lock() {
            Ok(guard) => guard,
            Err(_) if is_attached => {
                self.attached.take();
                let guard = lock.wait();
                self.attach();
                guard
            }
            Err(_) => lock.wait(),
        };
        if guard.poisoned && self.world.twin != Twin::IgnoresPoison {
            return Err(Poisoned);
        }
        Ok(guard)
    }

    fn attach(&self) {
        let guard = self.world.interpreter.lock();
        *self.attached.borrow_mut() = Some(guard.expect("nothing panics with the interpreter"));
    }
}

impl World {
    fn new(twin: Twin) -> Self {
        Self {
            twin,
            interpreter: Mutex::new(()),
            ledger: Lock::new(Ledger::default()),
            sequences: [Lock::new(0), Lock::new(0)],
            allocator: Lock::new(BLOCKS),
            index: Lock::new((0, 0)),
        }
    }

    /// Runs `work` attached, or detached where it takes long. A panic ends here.
    fn enter<'a>(&'a self, is_long: bool, work: impl FnOnce(&Keys<'a>) -> Result<(), Poisoned>) {
        let keys = Keys {
            world: self,
            attached: None.into(),
        };
        keys.attach();
        if is_long {
            keys.attached.take();
        }
        // What a call fails with is an exception in Python.
        let (Ok(()) | Err(Poisoned)) = work(&keys);
        if is_long {
            keys.attach();
        }
    }

    fn step(&self, is_long: bool) {
        self.enter(is_long, |keys| {
            let mut ledger = keys.lock(&self.ledger)?;
            if self.twin == Twin::LetsGoOfTheLedger {
                drop(ledger);
                thread::yield_now();
                ledger = keys.lock(&self.ledger)?;
            }
            for (at, sequence) in self.sequences.iter().enumerate() {
                let mut sequence = match keys.lock(sequence) {
                    Ok(sequence) => sequence,
                    Err(error) => {
                        // The appended tokens are removed.
                        for before in &self.sequences[..at] {
                            keys.lock(before)?.value -= 1;
                        }
                        return Err(error);
                    }
                };
                if self.twin == Twin::LetsGoOfTheLedger {
                    drop(ledger);
                    sequence.value += 1;
                    drop(sequence);
                    ledger = keys.lock(&self.ledger)?;
                    continue;
                }
                assert_eq!(
                    sequence.value, ledger.value.num_final[at],
                    "ids that the ledger does not know"
                );
                sequence.value += 1;
            }
            for num_final in &mut ledger.value.num_final {
                *num_final += 1;
            }
            Ok(())
        });
    }

    fn commit(&self, at: usize, is_long: bool) {
        self.enter(is_long, |keys| {
            let mut ledger = keys.lock(&self.ledger)?;
            let (sequence, mut index);
            if self.twin == Twin::IndexBeforeSequence {
                index = keys.lock(&self.index)?;
                sequence = keys.lock(&self.sequences[at])?;
            } else {
                sequence = keys.lock(&self.sequences[at])?;
                index = keys.lock(&self.index)?;
            }
            assert_eq!(
                sequence.value, ledger.value.num_final[at],
                "ids that the ledger does not know"
            );
            assert_eq!(
                index.value.0, index.value.1,
                "an index of which half is changed"
            );
            let held = std::mem::take(&mut ledger.value.held);
            index.value.0 += held;
            index.value.1 += held;
            Ok(())
        });
    }

    fn plan(&self, at: usize, is_long: bool) {
        self.enter(is_long, |keys| {
            let sequence = match self.twin {
                Twin::WaitsAttached => self.sequences[at].wait(),
                _ => keys.lock(&self.sequences[at])?,
            };
            let index = keys.lock(&self.index)?;
            assert_eq!(
                index.value.0, index.value.1,
                "an index of which half is changed"
            );
            drop(sequence);
            Ok(())
        });
    }

    fn allocate(&self, is_long: bool) {
        self.enter(is_long, |keys| {
            let mut ledger = keys.lock(&self.ledger)?;
            let mut free = keys.lock(&self.allocator)?;
            let mut index = keys.lock(&self.index)?;
            assert_eq!(
                index.value.0, index.value.1,
                "an index of which half is changed"
            );
            assert_eq!(
                free.value + ledger.value.held + index.value.0,
                BLOCKS,
                "a block is lost"
            );
            if free.value == 0 && index.value.0 > 0 {
                index.value.0 -= 1;
                index.value.1 -= 1;
                free.value += 1;
            }
            if free.value > 0 {
                free.value -= 1;
                ledger.value.held += 1;
            }
            Ok(())
        });
    }

    /// An insert that panics between two changes.
    fn panic_inside(&self, at: usize, is_long: bool) {
        self.enter(is_long, |keys| {
            let mut sequence = keys.lock(&self.sequences[at])?;
            let mut index = keys.lock(&self.index)?;
            index.value.0 += 1;
            (sequence.poisoned, index.poisoned) = (true, true);
            Err(Poisoned)
        });
    }
}

/// Runs calls in threads, one of which panics inside a call if `panics`.
///
/// # Panics
/// When a call sees what no finished call has left.
pub fn run(twin: Twin, panics: bool) {
    let world = Arc::new(World::new(twin));
    let spawn = |work: fn(&World)| {
        let world = Arc::clone(&world);
        thread::spawn(move || work(&world))
    };
    let mut threads = vec![
        spawn(|world| {
            world.step(false);
            world.commit(0, true);
            world.plan(1, false);
        }),
        spawn(|world| {
            world.plan(1, true);
            world.step(true);
        }),
        spawn(|world| {
            world.allocate(false);
            world.commit(1, false);
            world.plan(0, false);
        }),
    ];
    if panics {
        threads.push(spawn(|world| world.panic_inside(1, false)));
    }
    for thread in threads {
        thread.join().expect("a thread whose calls end");
    }
}
