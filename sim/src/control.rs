//! `/sim/*`: what a program may do to an engine that a test does through its handle. Not part of any engine's protocol,
//! never recorded.

use std::sync::PoisonError;

use http::Method;
use serde::Serialize;
use serde_json::json;

use crate::ambient;
use crate::answer::Reply;
use crate::fault::Fault;
use crate::record::Record;
use crate::state::Core;

/// Whether a path is a control path.
pub(crate) fn is_control(path: &str) -> bool {
    path.starts_with("/sim/")
}

/// Answers a control request.
pub(crate) fn answer(core: &Core, method: &Method, path: &str, body: &[u8]) -> Reply {
    match (method.as_str(), path) {
        ("GET", "/sim/records") => records(core),
        ("DELETE", "/sim/records") => {
            core.records.clear();
            done()
        }
        ("GET", "/sim/stats") => {
            core.expire_leases();
            Reply::value(200, &core.stats())
        }
        ("GET", "/sim/violations") => Reply::value(200, &core.violations()),
        ("POST", "/sim/faults") => script(core, body),
        ("DELETE", "/sim/faults") => {
            core.faults.clear();
            done()
        }
        ("POST", "/sim/hold") => {
            let mut held = core.control_hold.lock().unwrap_or_else(PoisonError::into_inner);
            if held.is_none() {
                *held = Some(core.gate.hold());
            }
            done()
        }
        ("POST", "/sim/release") => {
            // Dropping a hold releases it.
            drop(core.control_hold.lock().unwrap_or_else(PoisonError::into_inner).take());
            done()
        }
        ("POST", "/sim/kill") => {
            core.ending.kill.cancel();
            done()
        }
        _ => Reply::json(404, r#"{"error":"no such control path"}"#),
    }
}

fn done() -> Reply {
    Reply::json(200, r#"{"ok":true}"#)
}

/// One fault or a list of them.
fn script(core: &Core, body: &[u8]) -> Reply {
    let faults = serde_json::from_slice::<Vec<Fault>>(body)
        .or_else(|_| serde_json::from_slice::<Fault>(body).map(|fault| vec![fault]));
    match faults {
        Ok(faults) => {
            let most = core.config.limits.faults;
            if faults.into_iter().all(|fault| core.faults.add(fault, most)) {
                done()
            } else {
                Reply::value(429, &json!({"error": format!("at most {most} faults can wait")}))
            }
        }
        Err(error) => Reply::value(400, &json!({"error": error.to_string()})),
    }
}

#[derive(Serialize)]
struct Shown<'a> {
    seq: u64,
    method: &'a str,
    path: &'a str,
    headers: &'a [(String, String)],
    body: std::borrow::Cow<'a, str>,
    body_length: usize,
    body_hash: String,
    age_ms: u128,
    status: Option<u16>,
    end: Option<crate::record::End>,
    lasted_ms: Option<u128>,
    duplicate_id: bool,
}

fn records(core: &Core) -> Reply {
    let now = ambient::now();
    let records = core.records.all();
    let shown = |record: &Record| {
        let shown = Shown {
            seq: record.seq,
            method: &record.method,
            path: &record.path,
            headers: &record.headers,
            body: String::from_utf8_lossy(&record.body),
            body_length: record.body_length,
            body_hash: format!("{:016x}", record.body_hash),
            age_ms: now.saturating_duration_since(record.received_at).as_millis(),
            status: record.status,
            end: record.ended(),
            lasted_ms: record.end.map(|(at, _)| at.saturating_duration_since(record.received_at).as_millis()),
            duplicate_id: record.duplicate_id,
        };
        serde_json::to_value(shown).unwrap_or_default()
    };
    Reply::value(200, &records.iter().map(shown).collect::<Vec<_>>())
}
