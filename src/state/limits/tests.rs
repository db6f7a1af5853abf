//! Records, what one replica counts alone, and what happens without Redis.

use bytes::Bytes;

use super::users::UserRecord;
use super::*;
use crate::state::redis::RedisConfig;

#[test]
fn records_are_read_as_the_reference_reads_them() {
    // JSON, requests, tokens, whether tokens have to be known.
    for (json, requests, tokens, limits_tokens) in [
        (r#"{"name":"a","rpm":60,"tpm":5000}"#, 60, 5000, true),
        (r#"{"name":"a","rpm":0,"tpm":0}"#, 100, 100_000, false),
        (r#"{"name":"a","rpm":7,"tpm":0}"#, 7, 7000, false),
        (r#"{"name":"a","rpm":0,"tpm":1}"#, 100, 1, true),
        (r#"{"RPM":3,"Tpm":4,"more":[1]}"#, 3, 4, true),
        (r#"{"rpm":null}"#, 100, 100_000, false),
        ("{}", 100, 100_000, false),
        (r#"{"rpm":-1,"tpm":-1}"#, 0, 0, false),
        (r#"{"rpm":9223372036854775807}"#, i64::MAX.unsigned_abs(), i64::MAX.unsigned_abs(), false),
    ] {
        let record = UserRecord::read(json.as_bytes()).expect(json);
        assert_eq!(
            (record.requests(), record.tokens(), record.limits_tokens()),
            (requests, tokens, limits_tokens),
            "{json}"
        );
    }
    let long = format!(r#"{{"name":"{}"}}"#, "x".repeat(5000));
    for json in ["", "x", "[]", "7", r#"{"rpm":"60"}"#, r#"{"rpm":1.5}"#, r#"{"tpm":1e30}"#, long.as_str()] {
        assert_eq!(UserRecord::read(json.as_bytes()), None, "{json}");
    }
}

#[test]
fn a_part_is_rounded_up() {
    for (limit, members, expected) in
        [(60, 3, 20), (61, 3, 21), (1, 3, 1), (0, 3, 0), (5, 0, 5), (5, 1, 5), (u64::MAX, 2, 1 << 63)]
    {
        assert_eq!(part(limit, members), expected, "{limit} / {members}");
    }
}

fn known(users: &Users, name: &str, json: &'static str, at: Tick) -> Arc<User> {
    users.keep(&name.into(), Ok(Some(Bytes::from_static(json.as_bytes()))), at).unwrap().unwrap()
}

#[test]
fn one_replica_counts_a_users_minute() {
    let users = Users::default();
    let at = Tick::from_millis;
    let user = known(&users, "a", r#"{"rpm":5,"tpm":100}"#, at(0));
    // Half of five, rounded up.
    let take = |members, now| user.take_place(members, at(now));
    let mut first = take(2, 60_000).unwrap();
    first.keep();
    let second = take(2, 60_000).unwrap();
    let mut third = take(2, 61_000).unwrap();
    third.keep();
    assert_eq!(take(2, 70_000).unwrap_err(), (true, Duration::from_secs(50)));
    // Given back.
    drop(second);
    let second = take(2, 119_999).unwrap();
    assert_eq!(take(2, 119_999).unwrap_err(), (true, Duration::from_millis(1)));
    // The next minute is another one, and gets nothing back from the last.
    let mut only = take(5, 120_000).unwrap();
    drop(second);
    assert!(take(5, 120_000).is_err());
    only.keep();
    // What another read of the record says counts, and what was counted stays.
    let user = known(&users, "a", r#"{"rpm":50,"tpm":100}"#, at(120_000));
    let mut more = user.take_place(5, at(120_001)).unwrap();
    more.keep();
    only.spend(19);
    assert!(user.take_place(5, at(120_002)).is_ok());
    only.spend(1);
    assert!(!user.take_place(5, at(120_003)).unwrap_err().0, "a fifth of the tokens is used up");
    assert!(user.take_place(4, at(120_004)).is_ok());
    assert!(user.take_place(5, at(180_000)).is_ok());
}

#[test]
fn a_record_is_asked_for_once_and_believed_for_a_second() {
    let users = Users::default();
    let at = Tick::from_millis;
    let name: Arc<str> = "a".into();
    let Look::Load(tell, answer) = users.look(&name, at(0)) else { panic!() };
    assert!(matches!(users.look(&name, at(0)), Look::Wait(_)), "somebody asks already");
    let user = known(&users, "a", r#"{"rpm":1}"#, at(0));
    tell.send(Some(Ok(Some(user)))).unwrap();
    drop(answer);
    assert!(matches!(users.look(&name, at(999)), Look::Fresh(_)));
    assert!(matches!(users.look(&name, at(1000)), Look::Load(..)));
    // Whoever asked was given up: somebody else does.
    assert!(matches!(users.look(&name, at(1000)), Look::Load(..)));
    // Redis cannot be asked: what was known stays known.
    assert_eq!(users.keep(&name, Err(RedisError::Late), at(1000)).unwrap_err(), Trouble::Redis);
    assert_eq!(users.last_known("a").unwrap().record.requests(), 1);
    // It has become useless, or is gone: then so it is here.
    for (record, expected) in [(Some(Bytes::from_static(b"?")), Err(Trouble::Unusable)), (None, Ok(()))] {
        known(&users, "a", "{}", at(2000));
        assert_eq!(users.keep(&name, Ok(record), at(2000)).map(|user| assert!(user.is_none())), expected);
        assert!(users.last_known("a").is_none());
    }
    assert_eq!(users.len(), 0);
}

#[test]
fn the_records_that_are_kept_are_bounded() {
    let users = Users::default();
    for user in 0..20_000 {
        known(&users, &format!("u{user}"), "{}", Tick::from_millis(user));
        // One who comes again and again is not forgotten.
        known(&users, "often", "{}", Tick::from_millis(user));
        assert!(users.len() <= 2 * 4096, "{}", users.len());
    }
    assert!(users.last_known("u0").is_none());
    assert!(users.last_known("u19999").is_some() && users.last_known("often").is_some());
}

const WAIT: Duration = Duration::from_millis(50);

/// Limits over a port on which nobody listens.
fn alone(fallback: RateFallback) -> Arc<SharedLimits> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let plane = Plane::connect(&RedisConfig::from_parts("127.0.0.1", port, None)).unwrap();
    let parts = LimitParts {
        fallback,
        wait: WAIT,
        replica: "r".to_owned(),
        clock: Clock::system(),
        metrics: Arc::new(Metrics::new("gateway")),
        tasks: TaskTracker::new(),
    };
    SharedLimits::new(plane, parts)
}

fn of_model(per_second: u32) -> LimitCall {
    let model = ModelLimit { model: "m".into(), per_second, window: Arc::default() };
    LimitCall { user: None, model: Some(model) }
}

fn of_user(name: &str) -> LimitCall {
    LimitCall { user: Some(name.into()), model: None }
}

/// R71, without Redis: each setting for each limit.
#[tokio::test]
async fn r71_without_redis_the_setting_decides() {
    let unknown_record = of_user("never read");
    let local = alone(RateFallback::Local);
    local.members.store(2, Ordering::Relaxed);
    known(&local.users, "known", r#"{"rpm":2}"#, Tick(0));
    assert!(local.charge(unknown_record).await.is_ok(), "nobody knows the limit");
    let mut places = local.charge(of_user("known")).await.unwrap();
    places.keep();
    assert!(matches!(local.charge(of_user("known")).await, Err(LimitRefusal::UserRequests(2, _))), "one of two");
    let window = Arc::new(RateWindow::default());
    let model = || ModelLimit { model: "m".into(), per_second: 1_000_001, window: Arc::clone(&window) };
    let held = local.charge(LimitCall { user: None, model: Some(model()) }).await.unwrap();
    drop(held);
    assert_eq!(window.taken(local.parts.clock.now()), 0, "given back");
    assert_eq!(local.charge(of_model(0)).await.unwrap_err(), LimitRefusal::Model(0));

    let open = alone(RateFallback::Open);
    known(&open.users, "known", r#"{"rpm":1,"tpm":9}"#, Tick(0));
    for _ in 0..3 {
        let mut places = open.charge(of_user("known")).await.unwrap();
        assert!(places.counts_tokens() && places.user_counts().is_none());
        places.keep();
        assert!(open.charge(of_user("never read")).await.is_ok());
        assert!(open.charge(of_model(0)).await.is_ok());
    }

    let closed = alone(RateFallback::Closed);
    known(&closed.users, "known", "{}", closed.parts.clock.now());
    assert_eq!(closed.charge(of_user("known")).await.unwrap_err(), LimitRefusal::UserUncountable);
    assert_eq!(closed.charge(of_user("never read")).await.unwrap_err(), LimitRefusal::UserUnreadable);
    assert_eq!(closed.charge(of_model(9)).await.unwrap_err(), LimitRefusal::ModelUncountable);
}

/// A user's place goes back when the model refuses.
#[tokio::test]
async fn the_place_of_a_user_is_no_use_without_that_of_the_model() {
    let local = alone(RateFallback::Local);
    known(&local.users, "a", r#"{"rpm":1}"#, Tick(0));
    let refused = LimitCall { user: Some("a".into()), ..of_model(0) };
    assert_eq!(local.charge(refused).await.unwrap_err(), LimitRefusal::Model(0));
    assert!(local.charge(of_user("a")).await.is_ok());
}

/// Silence costs each of a few requests the bound, and then none for a while.
#[tokio::test(start_paused = true)]
async fn nobody_waits_for_long_for_a_server_that_is_silent() {
    let limits = alone(RateFallback::Open);
    let clock = limits.parts.clock;
    for turn in 0..PATIENCE {
        assert!(!limits.is_paused(), "{turn}");
        let began = clock.now();
        assert!(limits.in_time(began.plus(WAIT), std::future::pending::<()>()).await.is_none());
        assert!(clock.now().since(began) <= WAIT + Duration::from_millis(1));
    }
    assert!(limits.is_paused());
    let began = clock.now();
    assert!(limits.charge(of_model(1)).await.is_ok());
    assert_eq!(clock.now(), began);
    tokio::time::advance(PAUSE + Duration::from_millis(1)).await;
    assert!(!limits.is_paused());
    // An answer in between, and patience is whole again.
    for answered in [false, false, true, false, false] {
        let until = clock.now().plus(WAIT);
        let answer = async {
            if !answered {
                std::future::pending::<()>().await;
            }
        };
        assert_eq!(limits.in_time(until, answer).await.is_some(), answered);
    }
    assert!(!limits.is_paused());
}
