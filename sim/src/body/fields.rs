//! The top level of a request body, read as leniently as the engines' schemas read it: unknown fields are ignored, the last of
//! several equal keys wins, numbers may come as strings. Nested values keep their bytes.

use std::collections::HashMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::Complaint;

/// The fields of one body.
#[derive(Debug)]
pub(crate) struct Fields {
    raw: HashMap<String, Box<RawValue>>,
}

impl Fields {
    /// Parses a body.
    pub fn parse(body: &[u8]) -> Result<Fields, Complaint> {
        if body.is_empty() {
            return Err(Complaint::Empty);
        }
        match serde_json::from_slice(body) {
            Ok(raw) => Ok(Fields { raw }),
            Err(error) if error.is_data() => {
                let text = "Input should be a valid dictionary or object to extract fields from";
                let shown = serde_json::from_slice::<Value>(body).map_or_else(|_| String::new(), |value| shown(&value));
                Err(Complaint::schema("model_attributes_type", "", text, &shown))
            }
            Err(error) => {
                let lines: usize = body
                    .split_inclusive(|byte| *byte == b'\n')
                    .take(error.line().saturating_sub(1))
                    .map(<[u8]>::len)
                    .sum();
                Err(Complaint::InvalidJson { offset: lines + error.column().saturating_sub(1) })
            }
        }
    }

    /// How the engines show the whole body in an error.
    pub fn shown(&self) -> String {
        format!("<dict of {} items>", self.raw.len())
    }

    /// The names of all fields, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.raw.keys().map(String::as_str)
    }

    /// Whether a field is there at all, also as `null`.
    pub fn has(&self, name: &str) -> bool {
        self.raw.contains_key(name)
    }

    /// A field's text; `null` counts as absent.
    pub fn raw(&self, name: &str) -> Option<&RawValue> {
        self.raw.get(name).map(AsRef::as_ref).filter(|raw| raw.get() != "null")
    }

    /// A field's value.
    pub fn value(&self, name: &str) -> Option<Value> {
        self.raw(name).and_then(|raw| serde_json::from_str(raw.get()).ok())
    }

    /// An integer: a number without a fraction, a boolean, or a string that spells one.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, Complaint> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_i64().or_else(|| {
                let float = number.as_f64().filter(|float| float.fract() == 0.0 && float.abs() < 9e15);
                float.map(|float| float as i64)
            }),
            Value::String(text) => text.trim().parse().ok(),
            Value::Bool(truth) => Some(i64::from(*truth)),
            _ => None,
        };
        number.map(Some).ok_or_else(|| match &value {
            Value::String(_) => Complaint::schema(
                "int_parsing",
                name,
                "Input should be a valid integer, unable to parse string as an integer",
                &shown(&value),
            ),
            Value::Number(_) => Complaint::schema(
                "int_from_float",
                name,
                "Input should be a valid integer, got a number with a fractional part",
                &shown(&value),
            ),
            _ => Complaint::schema("int_type", name, "Input should be a valid integer", &shown(&value)),
        })
    }

    /// A number.
    pub fn number(&self, name: &str) -> Result<Option<f64>, Complaint> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        };
        number
            .map(Some)
            .ok_or_else(|| Complaint::schema("float_type", name, "Input should be a valid number", &shown(&value)))
    }

    /// A boolean; absent is false.
    pub fn truth(&self, name: &str) -> Result<bool, Complaint> {
        match self.value(name) {
            None => Ok(false),
            Some(Value::Bool(truth)) => Ok(truth),
            Some(Value::Number(number)) if number.as_i64() == Some(0) => Ok(false),
            Some(Value::Number(number)) if number.as_i64() == Some(1) => Ok(true),
            Some(Value::String(text)) if ["true", "1", "on", "yes"].contains(&text.to_lowercase().as_str()) => Ok(true),
            Some(Value::String(text)) if ["false", "0", "off", "no"].contains(&text.to_lowercase().as_str()) => {
                Ok(false)
            }
            Some(value) => Err(Complaint::schema(
                "bool_parsing",
                name,
                "Input should be a valid boolean, unable to interpret input",
                &shown(&value),
            )),
        }
    }

    /// A string.
    pub fn text(&self, name: &str) -> Result<Option<String>, Complaint> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => {
                Err(Complaint::schema("string_type", name, "Input should be a valid string", &shown(&value)))
            }
        }
    }

    /// An object with the bytes of its members.
    pub fn object(&self, name: &str) -> Result<Option<HashMap<String, Box<RawValue>>>, Complaint> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        serde_json::from_str(raw.get()).map(Some).map_err(|_| {
            let value = self.value(name).unwrap_or_default();
            Complaint::schema("dict_type", name, "Input should be a valid dictionary", &shown(&value))
        })
    }
}

/// How the engines show a value in an error.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.chars().take(64).collect(),
        Value::Array(list) => format!("<list of {} items>", list.len()),
        Value::Object(members) => format!("<dict of {} items>", members.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(body: &str) -> Fields {
        Fields::parse(body.as_bytes()).expect("an object")
    }

    #[test]
    fn integers_are_read_leniently() {
        for (text, expected) in [
            ("1", Some(Some(1))),
            ("-3", Some(Some(-3))),
            ("1e2", Some(Some(100))),
            ("1.0", Some(Some(1))),
            ("\"7\"", Some(Some(7))),
            ("true", Some(Some(1))),
            ("null", Some(None)),
            ("1.5", None),
            ("\"x\"", None),
            ("[]", None),
            ("1e300", None),
        ] {
            let got = fields(&format!(r#"{{"a":{text}}}"#)).integer("a").ok();
            assert_eq!(got, expected, "{text}");
        }
    }

    #[test]
    fn the_last_of_equal_keys_wins_and_escapes_count() {
        assert_eq!(fields(r#"{"a":1,"a":2}"#).integer("a"), Ok(Some(2)));
        assert_eq!(fields(r#"{"a":1,"\u0061":3}"#).integer("a"), Ok(Some(3)));
        assert_eq!(
            fields(r#"{"a":{"z":1, "b":9007199254740993}}"#).raw("a").expect("there").get(),
            r#"{"z":1, "b":9007199254740993}"#
        );
    }

    #[test]
    fn bodies_that_are_no_object_say_so() {
        assert_eq!(Fields::parse(b"").expect_err("empty"), Complaint::Empty);
        for (body, offset) in [("{\"a\":1,", 6), ("{", 0)] {
            assert_eq!(Fields::parse(body.as_bytes()).expect_err(body), Complaint::InvalidJson { offset });
        }
        for body in ["[]", "\"x\"", "5"] {
            let complaint = Fields::parse(body.as_bytes()).expect_err(body);
            assert!(matches!(complaint, Complaint::Schema { place, .. } if place.is_empty()), "{body}");
        }
        assert!(Fields::parse(b"{\"a\":\xff}").is_err());
    }
}
