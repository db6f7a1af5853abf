//! Names of effects, for tests that look at their order.

use crate::exchange::Effect;

pub(super) fn of(effect: &Effect) -> &'static str {
    match effect {
        Effect::AcceptHead { .. } => "accept",
        Effect::Pass { .. } => "pass",
        Effect::Prepare(_) => "prepare",
        Effect::ChargeLimits(_) => "charge",
        Effect::ExtendTimeout(_) => "extend",
        Effect::StartPrefill(_) => "prefill",
        Effect::CancelPrefill => "cancel",
        Effect::ForgetConnections => "forget",
        Effect::Deliver(_) => "deliver",
        Effect::Wake(_) => "wake",
        Effect::Route(_) => "route",
        Effect::Refuse(_) => "refuse",
        Effect::ForwardHead(_) => "head",
        Effect::ForwardChunk => "chunk",
        Effect::ForwardHeld(_) => "held",
        Effect::ReplaceChunk(_) => "replace",
        Effect::Decode(_) => "decode",
        Effect::FindResponse(_) => "find",
        Effect::CompleteAnswer => "complete",
        Effect::DropAnswer => "drop",
        Effect::Answer(_) => "answer",
        Effect::Claim(_) => "claim",
        Effect::LookUp(_) => "look_up",
        Effect::DetachPrefill(_) => "detach",
        Effect::Abort(_) => "abort",
        Effect::Cut(_) => "cut",
        Effect::End(_) => "end",
    }
}
