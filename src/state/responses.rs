//! Where stored responses are (the Responses API): each is in the memory of the pod that made it, and nowhere else.
//!
//! A replica knows those whose answers went through it. With Redis it tells the others, and asks them about what it does not
//! know; without, only its own are found. Both forget after `TANDEM_RESPONSE_TTL_SECONDS` without a look, and what is known
//! here is bounded: of too many, those that were not looked at for longest go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;

use super::redis::Plane;
use crate::clock::{Clock, Tick};

/// Longest id that is looked at, bytes. Engines make some 40.
pub const MAX_RESPONSE_ID: usize = 128;

/// Responses known here: up to twice as many.
const MAX_KNOWN: usize = 32 * 1024;

/// A call to Redis is given up after this: a request waits for it.
const CALL: Duration = Duration::from_millis(500);

/// A follow-up may come just after its response, and then before what was told of that: it is looked for once more.
const GRACE: Duration = Duration::from_millis(50);

/// The pod that has a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// The number by which all replicas know the pod's incarnation: a restarted engine has lost its responses.
    pub pod: u64,
    /// The model that was asked for.
    pub model: Arc<str>,
}

/// The responses that are known, and how to ask others.
#[derive(Debug)]
pub struct Responses {
    known: Mutex<Known>,
    ttl: Duration,
    shared: Option<Shared>,
}

#[derive(Debug, Default)]
struct Known {
    young: HashMap<Box<str>, (Home, Tick)>,
    /// Those that were young when there were too many; gone the next time, unless looked at before.
    old: HashMap<Box<str>, (Home, Tick)>,
}

#[derive(Debug)]
struct Shared {
    plane: Plane,
    clock: Clock,
    tasks: TaskTracker,
}

/// Whether an id can be one: short, and of characters that need no escape in a path or a key.
pub fn is_response_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    (1..=MAX_RESPONSE_ID).contains(&id.len()) && id.bytes().all(plain)
}

impl Responses {
    /// Knows what it is told, for so long.
    pub fn new(ttl: Duration) -> Responses {
        Responses { known: Mutex::default(), ttl, shared: None }
    }

    /// Shares it with other replicas.
    #[must_use]
    pub fn shared(self, plane: Plane, clock: Clock, tasks: TaskTracker) -> Responses {
        Responses { shared: Some(Shared { plane, clock, tasks }), ..self }
    }

    /// Notes where a response is. Nobody waits for the others to hear of it.
    pub fn remember(&self, id: &str, home: Home, now: Tick) {
        if !is_response_id(id) {
            return;
        }
        if let Some(Shared { plane, tasks, .. }) = &self.shared {
            let (plane, id, home, ttl) = (plane.clone(), id.to_owned(), home.clone(), self.ttl);
            tasks.spawn(async move {
                if let Err(error) = plane.keep_response(&id, &home, ttl, CALL).await {
                    tracing::debug!(%error, "the others do not hear where a response is");
                }
            });
        }
        self.lock().put(id, home, now);
    }

    /// What is known here. A look renews it.
    pub fn known(&self, id: &str, now: Tick) -> Option<Home> {
        let mut known = self.lock();
        let (home, at) = known.take(id)?;
        if now.since(at) >= self.ttl {
            return None;
        }
        known.put(id, home.clone(), now);
        Some(home)
    }

    /// Others may know more.
    pub fn asks_others(&self) -> bool {
        self.shared.is_some()
    }

    /// What the others know, within about a second; `None` also when they cannot be asked.
    pub fn find(self: &Arc<Self>, id: Arc<str>) -> BoxFuture<'static, Option<Home>> {
        let this = Arc::clone(self);
        async move {
            let Shared { plane, clock, .. } = this.shared.as_ref()?;
            let ask = async || {
                plane.find_response(&id, this.ttl, CALL).await.unwrap_or_else(|error| {
                    tracing::debug!(%error, "nobody can be asked where a response is");
                    None
                })
            };
            let mut home = ask().await;
            if home.is_none() {
                tokio::time::sleep(GRACE).await;
                home = ask().await;
            }
            let home = home?;
            this.lock().put(&id, home.clone(), clock.now());
            Some(home)
        }
        .boxed()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        // Nothing that holds it can panic halfway.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn take(&mut self, id: &str) -> Option<(Home, Tick)> {
        self.young.remove(id).or_else(|| self.old.remove(id))
    }

    fn put(&mut self, id: &str, home: Home, now: Tick) {
        if self.young.len() >= MAX_KNOWN {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(id.into(), (home, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(pod: u64) -> Home {
        Home { pod, model: "m".into() }
    }

    #[test]
    fn what_is_told_is_known_until_nobody_looks_for_the_ttl() {
        let responses = Responses::new(Duration::from_secs(10));
        let at = |seconds: u64| Tick::from_millis(seconds * 1000);
        responses.remember("resp_1", home(7), at(0));
        assert_eq!(responses.known("resp_1", at(9)), Some(home(7)));
        assert_eq!(responses.known("resp_1", at(18)), Some(home(7)), "a look renews it");
        assert_eq!(responses.known("resp_1", at(28)), None);
        assert_eq!(responses.known("resp_2", at(0)), None);
        responses.remember("resp_1", home(8), at(30));
        assert_eq!(responses.known("resp_1", at(30)), Some(home(8)), "the last word counts");
        assert!(!responses.asks_others());
    }

    #[test]
    fn ids_are_bounded_in_length_and_alphabet() {
        let longest = "r".repeat(MAX_RESPONSE_ID);
        for good in ["resp_0123abcDEF", "a", "chatcmpl-1.2", &longest] {
            assert!(is_response_id(good), "{good}");
        }
        for bad in ["", "a b", "a/b", "a%2Fb", "é", "a\n", &format!("{longest}r")] {
            assert!(!is_response_id(bad), "{bad}");
            let responses = Responses::new(Duration::from_secs(10));
            responses.remember(bad, home(1), Tick::from_millis(0));
            assert_eq!(responses.known(bad, Tick::from_millis(0)), None, "{bad}");
        }
    }

    #[test]
    fn no_more_are_known_than_there_is_room_for() {
        let responses = Responses::new(Duration::from_secs(10));
        let now = Tick::from_millis(0);
        for number in 0..3 * MAX_KNOWN as u64 {
            responses.remember(&format!("resp_{number}"), home(number), now);
            // Looked at all the time.
            assert_eq!(responses.known("resp_0", now), Some(home(0)));
        }
        let known = responses.lock();
        assert!(known.young.len() + known.old.len() <= 2 * MAX_KNOWN);
        drop(known);
        assert_eq!(responses.known("resp_1", now), None);
        assert!(responses.known(&format!("resp_{}", 3 * MAX_KNOWN - 1), now).is_some());
    }
}
