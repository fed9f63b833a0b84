//! Comparing the rows of the n-gram volume.

use infernix_artifact::Digest;
use infernix_artifact::ngram::Volume;

use super::map::Map;
use super::tally::Errors;
use super::{Context, NgramRows};
use crate::ConvertError;
use crate::ngram::TableReader;
use crate::recipe::Method;

/// Seed of the sample.
const SEED: u64 = 7;

/// Compares rows; returns the digest of all rows if all were read.
pub(super) fn compare(
    context: &Context<'_>,
    map: &Map,
    volume: &Volume,
    rows: NgramRows,
) -> Result<Option<Digest>, ConvertError> {
    let Some(plan) = &map.ngram else {
        context
            .tally
            .problem("the artifact has an n-gram volume, the checkpoint's model has no table".into());
        return Ok(None);
    };
    let path = volume.path().display();
    let Some(config) = &map.config else { return Ok(None) };
    plan.check_buffers(context.sources, config)?;
    let g = *volume.geometry();
    let format = volume.header().extension.as_ref().map(|e| e.format.clone());
    if g.rows != plan.rows
        || u64::from(g.row_bytes) != plan.row_bytes
        || format.is_some_and(|f| f != plan.format.name())
    {
        context.tally.problem(format!(
            "{path}: {} rows of {} bytes, the checkpoint's table has {} rows of {} bytes ({})",
            g.rows,
            g.row_bytes,
            plan.rows,
            plan.row_bytes,
            plan.format.name()
        ));
        return Ok(None);
    }
    if let Some(extension) = &volume.header().extension {
        let bits = |scales: &[f32]| scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
        let expected = plan.scale_words(context.sources)?;
        if bits(&extension.scales) != bits(&expected) {
            context
                .tally
                .problem(format!("{path}: scales {:?}, the checkpoint has {expected:?}", extension.scales));
        }
    }
    let reader = TableReader::new(plan, context.sources)?;
    let (mut source, mut scratch) = (Vec::new(), Vec::new());
    if let NgramRows::Sample(count) = rows {
        context.progress.begin("n-gram rows", count * plan.row_bytes);
        let count = count.min(plan.rows);
        for i in 0..count {
            context.interrupt.check()?;
            let row = if i + 1 == count { plan.rows - 1 } else { mix(SEED.wrapping_add(i)) % plan.rows };
            reader.read(row..row + 1, &mut source, &mut scratch)?;
            let found = volume.row(row)?;
            tell(context, plan, row, &source, &found);
            context.progress.advance(plan.row_bytes);
        }
        context.progress.end();
        return Ok(None);
    }
    let integrity = {
        context.progress.begin("n-gram digest", g.file_bytes());
        let found = volume.verify(context.interrupt, |bytes| context.progress.advance(bytes))?;
        context.progress.end();
        found
    };
    for problem in &integrity.problems {
        context.tally.problem(format!("{path}: {problem}"));
    }
    context.progress.begin("n-gram rows", plan.rows * plan.row_bytes);
    let batch = (context.step / plan.row_bytes.max(1)).max(1);
    let mut found = Vec::new();
    let mut errors = Errors {
        method: Method::TableMaxabs.name().into(),
        format: plan.format.name().into(),
        ..Errors::default()
    };
    let mut row = 0;
    while row < plan.rows {
        context.interrupt.check()?;
        let end = plan.rows.min(row + batch);
        reader.read(row..end, &mut source, &mut scratch)?;
        found.resize(source.len(), 0);
        volume.read_rows(row, &mut found)?;
        tell(context, plan, row, &source, &found);
        if map.table_target.is_some() {
            reader.errors(row..end, &found, &mut errors)?;
        }
        context.progress.advance(source.len() as u64);
        row = end;
    }
    context.progress.end();
    if let Some(target) = map.table_target {
        context.tally.errors(target, &errors);
    }
    Ok(integrity.row_digest)
}

fn tell(context: &Context<'_>, plan: &crate::NgramPlan, first: u64, source: &[u8], found: &[u8]) {
    let width = plan.row_bytes as usize;
    let count = (source.len() / width.max(1)) as u64;
    let mut wrong = 0;
    if source != found {
        for (row, (a, b)) in (first..).zip(source.chunks(width).zip(found.chunks(width))) {
            if a != b {
                wrong += 1;
                let at = a.iter().zip(b).take_while(|(x, y)| x == y).count();
                if wrong <= 20 {
                    let word = |bytes: &[u8]| bytes.get(at).map_or_else(String::new, |b| format!("{b:#04x}"));
                    context.tally.problem(format!(
                        "n-gram row {row}, byte {at}: expected {}, found {}",
                        word(a),
                        word(b)
                    ));
                }
            }
        }
    }
    context.tally.table_rows(count, wrong);
}

/// splitmix64's finalizer: spreads consecutive numbers.
fn mix(mut v: u64) -> u64 {
    v = v.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(0x9E37_79B9_7F4A_7C15);
    v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}
