//! The objects of one kind, as far as they are known.
//!
//! A scope (a namespace, or all of them) is replaced as a whole by a list, never by half of one, and changed by events.
//! Readers are the tasks that turn objects into something else; requests never come here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::wire::{Entry, ObjectKey, Objects};

/// What is known of one scope.
#[derive(Debug)]
enum Scope<T> {
    /// Not asked yet.
    Waiting,
    /// It could not be listed and never was before, or the API server does not know the kind.
    Unavailable,
    /// As last seen.
    Known(Objects<T>),
}

/// The objects of one kind.
#[derive(Debug)]
pub struct Store<T> {
    scopes: Mutex<Vec<Scope<T>>>,
    changes: watch::Sender<u64>,
}

impl<T: PartialEq> Store<T> {
    /// A store of so many scopes, none of which is known.
    pub fn new(scopes: usize) -> Store<T> {
        Store { scopes: Mutex::new((0..scopes).map(|_| Scope::Waiting).collect()), changes: watch::Sender::new(0) }
    }

    /// Learns of every change, by a number that grows.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Every object, by namespace and name; `None` while some scope was never listed.
    pub fn all(&self) -> Option<Vec<Arc<T>>> {
        self.collect(|scope| match scope {
            Scope::Known(objects) => Some(Some(objects)),
            Scope::Waiting | Scope::Unavailable => None,
        })
    }

    /// The same for objects that are not needed: a scope that could not be listed has none. `None` while it is not known
    /// whether a scope can be listed.
    pub fn available(&self) -> Option<Vec<Arc<T>>> {
        self.collect(|scope| match scope {
            Scope::Known(objects) => Some(Some(objects)),
            Scope::Unavailable => Some(None),
            Scope::Waiting => None,
        })
    }

    fn collect(&self, view: impl Fn(&Scope<T>) -> Option<Option<&Objects<T>>>) -> Option<Vec<Arc<T>>> {
        let scopes = self.lock();
        let known: Option<Vec<_>> = scopes.iter().map(view).collect();
        Some(
            known?
                .into_iter()
                .flatten()
                .flat_map(|objects| objects.values().map(|entry| Arc::clone(&entry.object)))
                .collect(),
        )
    }

    /// Objects held.
    pub fn len(&self) -> usize {
        let known = |scope: &Scope<T>| if let Scope::Known(objects) = scope { objects.len() } else { 0 };
        self.lock().iter().map(known).sum()
    }

    /// Holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A list is complete: what it does not hold has gone.
    pub(super) fn replace(&self, scope: usize, objects: Objects<T>) {
        self.change(scope, |known| {
            let same = matches!(known, Scope::Known(before) if *before == objects);
            *known = Scope::Known(objects);
            !same
        });
    }

    /// A scope cannot be listed. What is known of it stays.
    pub(super) fn unavailable(&self, scope: usize) {
        self.change(scope, |known| {
            let waiting = matches!(known, Scope::Waiting);
            if waiting {
                *known = Scope::Unavailable;
            }
            waiting
        });
    }

    /// The API server does not know the kind (any more): nothing is known of it.
    pub(super) fn forget(&self, scope: usize) {
        self.change(scope, |known| !matches!(std::mem::replace(known, Scope::Unavailable), Scope::Unavailable));
    }

    /// An object is there.
    pub(super) fn put(&self, scope: usize, key: ObjectKey, uid: Box<str>, object: T) {
        self.change(scope, |known| {
            let Scope::Known(objects) = known else { return false };
            if objects.get(&key).is_some_and(|entry| entry.uid == uid && *entry.object == object) {
                return false;
            }
            objects.insert(key, Entry { uid, object: Arc::new(object) });
            true
        });
    }

    /// The object of that UID has gone; one of the same name that came after it stays. An empty UID stands for any.
    pub(super) fn remove(&self, scope: usize, key: &ObjectKey, uid: &str) {
        self.change(scope, |known| {
            let Scope::Known(objects) = known else { return false };
            let meant = objects.get(key).is_some_and(|entry| uid.is_empty() || *entry.uid == *uid);
            meant && objects.remove(key).is_some()
        });
    }

    fn change(&self, scope: usize, change: impl FnOnce(&mut Scope<T>) -> bool) {
        let mut scopes = self.lock();
        let changed = scopes.get_mut(scope).is_some_and(change);
        drop(scopes);
        if changed {
            self.changes.send_modify(|changes| *changes += 1);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Scope<T>>> {
        // Nothing under this lock panics half-way through a change.
        self.scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
