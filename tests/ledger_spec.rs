//! The shared ledger's protocol as a small specification, explored exhaustively: three replicas, two pods, and every order
//! of charges, publications, claims, joins, pauses, crashes, reaps and losses of all data that the budgets allow. A call that
//! was sent may arrive at any time, any number of times, or never; its reply may get lost.
//!
//! What `lua/ledger_*.lua` and `lua/claim.lua` do is told here a third time, on numbers instead of bytes. The integration
//! test `state::exactness` ties the scripts to a model of the same shape.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests fail by panicking")]

use std::collections::{HashSet, VecDeque};

const REPLICAS: usize = 3;
const PODS: usize = 2;
/// Members that may ever join, over all epochs.
const MEMBERS: usize = 5;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Life {
    #[default]
    Unborn,
    Alive,
    /// Its record is gone, its shares are leaving.
    Dying,
    Gone,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Member {
    life: Life,
    expired: bool,
    written: u8,
    granted: u8,
    entries: [u8; PODS],
}

/// A pod as the server keeps it: the sum is kept, not added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Pod {
    sum: u8,
    last: u8,
    who: u8,
    other: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Call {
    epoch: u8,
    member: u8,
    sequence: u8,
    shares: [Option<u8>; PODS],
    /// A claim: the version it was decided on, and what the others had on each pod by then.
    claim: Option<(u8, [u8; PODS])>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Replica {
    member: Option<(u8, u8)>,
    sequence: u8,
    cells: [u8; PODS],
    /// Version of its view, and the others' sums in it.
    view: (u8, [u8; PODS]),
}

/// How often things may still happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Budget {
    changes: u8,
    sends: u8,
    expiries: u8,
    crashes: u8,
    losses: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    epoch: u8,
    version: u8,
    born: u8,
    members: [Member; MEMBERS],
    pods: [Pod; PODS],
    replicas: [Replica; REPLICAS],
    calls: Vec<Call>,
    left: Budget,
}

const NOBODY: u8 = u8::MAX;

impl State {
    fn start(left: Budget) -> State {
        let mut state = State {
            epoch: 0,
            version: 0,
            born: 0,
            members: Default::default(),
            pods: [Pod { who: NOBODY, ..Pod::default() }; PODS],
            replicas: Default::default(),
            calls: Vec::new(),
            left,
        };
        for replica in 0..REPLICAS {
            state.join(replica, true);
        }
        state
    }

    fn others(&self, pod: usize, member: u8) -> u8 {
        self.pods[pod].sum - self.members[member as usize].entries[pod]
    }

    fn look(&mut self, replica: usize) {
        if let Some((epoch, member)) = self.replicas[replica].member
            && epoch == self.epoch
        {
            let sums = [0, 1].map(|pod| self.others(pod, member));
            self.replicas[replica].view = (self.version, sums);
        }
    }

    fn join(&mut self, replica: usize, told: bool) {
        let member = self.born;
        self.born += 1;
        self.members[member as usize] = Member { life: Life::Alive, ..Member::default() };
        if told {
            let cells = self.replicas[replica].cells;
            self.replicas[replica] = Replica { member: Some((self.epoch, member)), cells, ..Replica::default() };
            self.look(replica);
        }
    }

    fn put(&mut self, member: u8, author: u8, shares: [Option<u8>; PODS]) {
        let mut changed = false;
        for (pod, share) in shares.iter().enumerate() {
            let Some(share) = *share else { continue };
            let entry = &mut self.members[member as usize].entries[pod];
            if *entry == share {
                continue;
            }
            changed = true;
            let pod = &mut self.pods[pod];
            pod.sum = pod.sum + share - *entry;
            *entry = share;
            pod.other = if pod.who == author { pod.other } else { pod.last };
            (pod.last, pod.who) = (self.version + 1, author);
        }
        self.version += u8::from(changed);
    }

    /// The call arrives. Returns whether its sender, if it hears the reply, is still a member.
    fn arrive(&mut self, call: Call) -> bool {
        let index = call.member as usize;
        if call.epoch != self.epoch || self.members[index].life != Life::Alive {
            return false;
        }
        if call.sequence <= self.members[index].written {
            return true;
        }
        if let Some((since, ghost)) = call.claim {
            let conflict = self.pods.iter().any(|pod| {
                let last = if pod.who == call.member { pod.other } else { pod.last };
                last > since
            });
            if conflict {
                return true;
            }
            let now = [0, 1].map(|pod| self.others(pod, call.member));
            assert_eq!(now, ghost, "what was granted rested on what is: {self:?}");
            self.members[index].granted = call.sequence;
        } else {
            self.members[index].expired = false;
        }
        self.put(call.member, call.member, call.shares);
        self.members[index].written = call.sequence;
        true
    }

    fn send(&mut self, replica: usize, shares: [Option<u8>; PODS], claims: bool) {
        let sender = &mut self.replicas[replica];
        let Some((epoch, member)) = sender.member else { return };
        sender.sequence += 1;
        let claim = claims.then_some(sender.view);
        self.calls.push(Call { epoch, member, sequence: sender.sequence, shares, claim });
        self.calls.sort_unstable();
        self.left.sends -= 1;
    }

    /// All states that may follow.
    fn next(&self, found: &mut Vec<State>) {
        let mut add = |change: &dyn Fn(&mut State)| {
            let mut state = self.clone();
            change(&mut state);
            if state != *self {
                found.push(state);
            }
        };
        for replica in 0..REPLICAS {
            let here = self.replicas[replica];
            if self.left.changes > 0 {
                for pod in 0..PODS {
                    add(&|state| {
                        state.replicas[replica].cells[pod] ^= 1;
                        state.left.changes -= 1;
                    });
                }
            }
            if here.member.is_none() && (self.born as usize) < MEMBERS {
                add(&|state| state.join(replica, true));
                add(&|state| state.join(replica, false));
            }
            if here.member.is_some() && self.left.sends > 0 {
                let [one, two] = here.cells.map(Some);
                for shares in [[one, None], [None, two], [one, two]] {
                    add(&|state| state.send(replica, shares, false));
                }
                if self.left.changes > 0 && here.cells[0] == 0 {
                    add(&|state| {
                        state.replicas[replica].cells[0] = 1;
                        state.left.changes -= 1;
                        state.send(replica, [Some(1), None], true);
                    });
                }
            }
            if self.left.crashes > 0 {
                add(&|state| {
                    state.replicas[replica] = Replica::default();
                    state.left.crashes -= 1;
                });
            }
        }
        for call in &self.calls {
            add(&|state| {
                state.arrive(*call);
            });
            let sender = self.replicas.iter().position(|replica| replica.member == Some((call.epoch, call.member)));
            if let Some(sender) = sender {
                add(&|state| {
                    if state.arrive(*call) {
                        state.look(sender);
                    } else {
                        state.replicas[sender].member = None;
                    }
                });
            }
        }
        for member in 0..self.born {
            let index = member as usize;
            let here = self.members[index];
            if here.life == Life::Alive && !here.expired && self.left.expiries > 0 {
                add(&|state| {
                    state.members[index].expired = true;
                    state.left.expiries -= 1;
                });
            }
            if here.life == Life::Alive && here.expired {
                add(&|state| state.members[index].life = Life::Dying);
            }
            if here.life == Life::Dying {
                for pod in 0..PODS {
                    let mut shares = [None; PODS];
                    shares[pod] = Some(0);
                    add(&|state| state.put(member, NOBODY, shares));
                }
                // The walk over the pods ends when it has seen them all.
                if here.entries == [0; PODS] {
                    add(&|state| state.members[index].life = Life::Gone);
                }
            }
        }
        if self.left.losses > 0 {
            add(&|state| {
                state.epoch += 1;
                state.version = 0;
                state.pods = [Pod { who: NOBODY, ..Pod::default() }; PODS];
                for member in &mut state.members[..state.born as usize] {
                    *member = Member { life: Life::Gone, ..Member::default() };
                }
                state.left.losses -= 1;
            });
        }
    }

    fn check(&self, before: Option<&State>) {
        for pod in 0..PODS {
            let sum: u8 = self.members.iter().map(|member| member.entries[pod]).sum();
            assert_eq!(self.pods[pod].sum, sum, "the sum is that of the shares: {self:?}");
        }
        for (index, member) in self.members.iter().enumerate() {
            if matches!(member.life, Life::Gone | Life::Unborn) {
                assert_eq!(member.entries, [0; PODS], "the dead have nothing: {self:?}");
            }
            if let Some(before) = before {
                let was = before.members[index];
                assert!(was.life <= member.life, "nobody rises from the dead: {before:?} {self:?}");
                if was.life == Life::Dying {
                    let shrinks = was.entries.iter().zip(member.entries).all(|(was, is)| is <= *was);
                    assert!(shrinks, "a share leaves once and stays away: {before:?} {self:?}");
                }
            }
        }
    }

    /// All is well again: the lost time out and are reaped, everybody tells what it has. Then all that was ever sent comes
    /// once more, and changes nothing.
    fn heal(&self) -> State {
        let mut state = self.clone();
        state.left = Budget { changes: 0, sends: u8::MAX, expiries: 0, crashes: 0, losses: 0 };
        for replica in 0..REPLICAS {
            let shares = state.replicas[replica].cells.map(Some);
            if state.replicas[replica].member.is_some() {
                state.send(replica, shares, false);
            }
            let sent = state.replicas[replica].member;
            let call = state.calls.iter().copied().filter(|call| Some((call.epoch, call.member)) == sent).max();
            if !call.is_some_and(|call| state.arrive(call)) && (state.born as usize) < MEMBERS {
                state.join(replica, true);
                state.send(replica, shares, false);
                let sent = state.replicas[replica].member;
                let call = state.calls.iter().copied().find(|call| Some((call.epoch, call.member)) == sent);
                assert!(state.arrive(call.expect("just sent")));
            }
        }
        let current: Vec<u8> =
            state.replicas.iter().filter_map(|replica| replica.member).map(|(_, member)| member).collect();
        for member in (0..state.born).filter(|member| !current.contains(member)) {
            if matches!(state.members[member as usize].life, Life::Alive | Life::Dying) {
                state.members[member as usize].life = Life::Dying;
                state.put(member, NOBODY, [Some(0); PODS]);
                state.members[member as usize].life = Life::Gone;
            }
        }
        for call in state.calls.clone().into_iter().filter(|call| call.claim.is_none()) {
            state.arrive(call);
        }
        state
    }
}

/// Every state that can be reached, checked.
fn explore(left: Budget) -> usize {
    let start = State::start(left);
    let mut seen = HashSet::from([start.clone()]);
    let mut queue = VecDeque::from([start]);
    let mut found = Vec::new();
    while let Some(state) = queue.pop_front() {
        let healed = state.heal();
        healed.check(None);
        // Without room for another member there is no healing.
        if (healed.born as usize) < MEMBERS {
            for pod in 0..PODS {
                let work: u8 = healed.replicas.iter().map(|replica| replica.cells[pod]).sum();
                assert_eq!(healed.pods[pod].sum, work, "from {state:?}\nto {healed:?}");
            }
        }
        state.next(&mut found);
        for next in found.drain(..) {
            if !seen.contains(&next) {
                next.check(Some(&state));
                seen.insert(next.clone());
                queue.push_back(next);
            }
        }
    }
    seen.len()
}

#[test]
fn the_ledger_keeps_its_promises_in_every_state() {
    let none = Budget { changes: 0, sends: 0, expiries: 0, crashes: 0, losses: 0 };
    let mut states = 0;
    for budget in [
        // Late and repeated calls against newer ones.
        Budget { changes: 1, sends: 3, ..none },
        // A pause, a reap, and what was on its way.
        Budget { changes: 1, sends: 2, expiries: 1, ..none },
        // A crash, and a new process in its place.
        Budget { changes: 2, sends: 1, crashes: 1, expiries: 1, ..none },
        // All data lost.
        Budget { changes: 1, sends: 2, losses: 1, ..none },
    ] {
        let found = explore(budget);
        println!("{found} states with {budget:?}");
        assert!(found > 1_000, "the model moves");
        states += found;
    }
    println!("{states} states in all");
}
