//! JSON in which no object has a key twice: readers differ in which of the two counts.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fmt::{Formatter, Result as Written};
use std::marker::PhantomData;

/// The fields of an object, each made by `read` of its key.
pub(super) fn fields<'de, A: MapAccess<'de>, T>(
    mut from: A,
    read: impl Fn(&str, &mut A) -> Result<T, A::Error>,
) -> Result<BTreeMap<String, T>, A::Error> {
    let mut fields = BTreeMap::new();
    while let Some(key) = from.next_key::<String>()? {
        match fields.entry(key) {
            Entry::Vacant(place) => {
                let value = read(place.key(), &mut from)?;
                place.insert(value);
            }
            Entry::Occupied(twin) => {
                let key: String = twin.key().chars().take(60).collect();
                return Err(A::Error::custom(format!("{key:?} is there twice")));
            }
        }
    }
    Ok(fields)
}

/// An object of values of one type.
pub(super) struct Object<T>(pub(super) BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Fields(PhantomData)).map(Self)
    }
}

struct Fields<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
    type Value = BTreeMap<String, T>;

    fn expecting(&self, f: &mut Formatter) -> Written {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<Self::Value, A::Error> {
        fields(from, |_, from| from.next_value())
    }
}

/// Any value.
pub(super) struct Strict(pub(super) Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Any).map(Self)
    }
}

struct Any;

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut Formatter) -> Written {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, x: bool) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_i64<E>(self, x: i64) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_u64<E>(self, x: u64) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_f64<E>(self, x: f64) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_str<E>(self, x: &str) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Strict(value)) = from.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<Value, A::Error> {
        let fields = fields(from, |_, from| from.next_value().map(|Strict(value)| value))?;
        Ok(Value::Object(fields.into_iter().collect()))
    }
}
