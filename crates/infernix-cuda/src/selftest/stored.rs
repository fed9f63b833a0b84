//! Experts as stored, in records and in plain rows: whole experts in the canonical order of sums, records that are
//! brought to the device, addresses of planes. Equal bits throughout.

use super::{Run, unequal};
use crate::driver::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::kernels::linear::{Linear, WeightFormat};
use crate::kernels::stored::{RowProduct, StoredExperts, StoredForm, StoredProduct};
use crate::oracle::num::{Rng, bf16, e2m1, e4m3, f32_to_bf16, parallel, rbf};
use crate::oracle::words::Words;
use crate::oracle::{chain, w4a4};
use infernix_formats::Layout;
use infernix_formats::expert_bank::{BankShape, BlockFp8Planes, Nvfp4Planes, pack_fp8, pack_nvfp4};

/// A matrix as a checkpoint stores it and as exact values.
struct Matrix {
    k: usize,
    /// Values of a row that share a scale, and rows that do.
    tile: [usize; 2],
    words: Vec<u8>,
    scale_words: Vec<u8>,
    codes: Vec<f32>,
    scales: Vec<f32>,
}

impl Matrix {
    fn random(rng: &mut Rng, form: StoredForm, n: usize, k: usize) -> Self {
        if form == StoredForm::Rg16 {
            let words = rng.bytes(n * k / 2);
            // Mostly of ordinary size; zeros, subnormal ones and all others among them.
            let scale = |_| match rng.below(32) {
                0 => 0,
                1 => 1 + rng.below(7) as u8,
                2 => rng.below(0x7F) as u8,
                _ => 0x28 + rng.below(16) as u8,
            };
            let scale_words: Vec<u8> = (0..n * k / 16).map(scale).collect();
            let codes = words.iter().flat_map(|w| [e2m1(w & 15), e2m1(w >> 4)]).collect();
            let scales = scale_words.iter().map(|w| e4m3(*w)).collect();
            return Matrix { k, tile: [16, 1], words, scale_words, codes, scales };
        }
        let number = |w: u8| if w & 0x7F == 0x7F { w ^ 1 } else { w };
        let words: Vec<u8> = rng.bytes(n * k).into_iter().map(number).collect();
        let codes = words.iter().map(|w| e4m3(*w)).collect();
        // Codes are of about 128.
        let size = 0.25 / 128.0 / (k as f32).sqrt();
        let tiles = n.div_ceil(128) * k.div_ceil(128);
        let scales = (0..tiles).map(|_| size * (0.5 + rng.unit() as f32)).collect();
        Matrix { k, tile: [128, 128], words, scale_words: vec![], codes, scales }
    }

    /// The canonical sum of a row, before the last scale.
    fn product(&self, row: usize, x: &[f32]) -> f32 {
        let [group, rows] = self.tile;
        let groups = self.k.div_ceil(group);
        let scales = &self.scales[row / rows * groups..][..groups];
        chain::sum(&self.codes[row * self.k..][..self.k], scales, x, group)
    }

    fn nvfp4(&self) -> Nvfp4Planes<'_> {
        Nvfp4Planes { codes: &self.words, scales: &self.scale_words }
    }

    fn fp8(&self) -> BlockFp8Planes<'_> {
        BlockFp8Planes { codes: &self.words, scales: &self.scales }
    }
}

/// Experts and their records.
struct Bank {
    form: StoredForm,
    shape: BankShape,
    experts: Vec<[Matrix; 3]>,
    /// `record_bytes` each.
    records: Vec<Vec<u8>>,
    /// `[E][3]`, or empty.
    last: Vec<f32>,
    divide: bool,
}

impl Bank {
    fn random(rng: &mut Rng, form: StoredForm, [e, h, i]: [usize; 3], divide: bool) -> Result<Self> {
        let rg16 = form == StoredForm::Rg16;
        let layout = if rg16 { Layout::Nvfp4ExpertRg16V1 } else { Layout::Fp8ExpertBlock128V1 };
        let bad =
            |e: infernix_formats::FormatError| CudaError::Shape { kernel: "stored", what: e.to_string() };
        let shape = BankShape::new(layout, &[e as u64, h as u64, i as u64]).map_err(bad)?;
        let (mut experts, mut records, mut last) = (vec![], vec![], vec![]);
        for _ in 0..e {
            let m = [(i, h), (i, h), (h, i)].map(|(n, k)| Matrix::random(rng, form, n, k));
            let [gate, up, down] = &m;
            let mut record = vec![0; shape.record_bytes as usize];
            if rg16 {
                pack_nvfp4(&shape, gate.nvfp4(), up.nvfp4(), down.nvfp4(), &mut record).map_err(bad)?;
                for m in &m {
                    let factor = 0.25 / (m.k as f32).sqrt() * (0.5 + rng.unit() as f32);
                    last.push(if divide { 1.0 / factor } else { factor });
                }
            } else {
                pack_fp8(&shape, gate.fp8(), up.fp8(), down.fp8(), &mut record).map_err(bad)?;
            }
            experts.push(m);
            records.push(record);
        }
        Ok(Bank { form, shape, experts, records, last, divide })
    }

    fn hidden(&self) -> usize {
        self.shape.hidden as usize
    }

    fn intermediate(&self) -> usize {
        self.shape.intermediate as usize
    }

    /// Bytes of a record before the codes and before the scales of gate with up, and of down.
    fn offsets(&self) -> [[usize; 2]; 2] {
        let (h, i) = (self.hidden(), self.intermediate());
        if self.form == StoredForm::Rg16 {
            return [[0, 0], [self.records[0].len() / 3 * 2, 0]];
        }
        let (scales, tiles) = ((3 * h * i).next_multiple_of(256), h.div_ceil(128) * i.div_ceil(128));
        [[0, scales], [2 * h * i, scales + 8 * tiles]]
    }

    /// `silu(gate) up` of an expert for one row, and what down makes of it.
    fn expert(&self, e: usize, x: &[u16]) -> (Vec<u16>, Vec<u16>) {
        let values = |v: &[u16]| v.iter().map(|w| bf16(*w)).collect::<Vec<f32>>();
        let x = values(x);
        let product = |m: usize, row: usize, x: &[f32]| {
            let v = self.experts[e][m].product(row, x);
            match self.last.get(3 * e + m) {
                None => v,
                Some(l) if self.divide => v / l,
                Some(l) => v * l,
            }
        };
        let gated = |r: usize| w4a4::swiglu(rbf(product(0, r, &x)), rbf(product(1, r, &x)));
        let mid: Vec<u16> = (0..self.intermediate()).map(gated).collect();
        let v = values(&mid);
        let y = (0..self.hidden()).map(|r| f32_to_bf16(product(2, r, &v))).collect();
        (mid, y)
    }
}

/// Words past a result that must stay as they were.
const GUARD: usize = 64;

/// Picks of a bank's experts with their inputs, and where results go.
struct Picks {
    ids: Vec<i32>,
    share: usize,
    x: Vec<u16>,
    device_ids: DeviceBuffer,
    device_x: DeviceBuffer,
    last: Option<DeviceBuffer>,
    mid: DeviceBuffer,
    y: DeviceBuffer,
}

impl Picks {
    fn random(run: &mut Run, bank: &Bank, picks: usize, share: usize) -> Result<Self> {
        let (dev, h, i) = (run.dev.clone(), bank.hidden(), bank.intermediate());
        let ids: Vec<i32> = (0..picks).map(|_| run.rng.below(bank.experts.len()) as i32).collect();
        let mut x = run.rng.bf16(picks.div_ceil(share) * h, 1.0);
        // A group of zeros of both signs and a large value.
        x[..16].copy_from_slice(&[0, 0x8000].repeat(8));
        x[h / 2] = 0x4500;
        let last = if bank.last.is_empty() { None } else { Some(dev.upload(&bank.last)?) };
        let (device_ids, device_x) = (dev.upload(&ids)?, dev.upload(&x)?);
        let (mid, y) = (dev.alloc(2 * (picks * i + GUARD))?, dev.alloc(2 * (picks * h + GUARD))?);
        Ok(Picks { ids, share, x, device_ids, device_x, last, mid, y })
    }

    /// Gate with up, then down, through the records of `at`; with `away` those of the host are read there.
    fn launch(
        &self,
        run: &Run,
        op: &StoredExperts,
        bank: &Bank,
        (at, away): (u64, u64),
        pdl: bool,
    ) -> Result<()> {
        let (h, i) = (bank.hidden(), bank.intermediate());
        let [first, second] = bank.offsets().map(|[codes, scales]| StoredProduct {
            at,
            away,
            ids: self.device_ids.ptr(),
            last: self.last.as_ref().map_or(0, DeviceBuffer::ptr),
            divide: bank.divide,
            codes,
            scales,
            n: 2 * i,
            k: h,
            pairs: true,
        });
        let second = StoredProduct { n: h, k: i, pairs: false, ..second };
        let (s, picks, mid) = (&run.stream, self.ids.len(), self.mid.ptr());
        op.product(s, bank.form, &first, picks, self.device_x.ptr(), self.share, mid, pdl)?;
        op.product(s, bank.form, &second, picks, mid, 1, self.y.ptr(), true)
    }

    /// Compares the results, after the stream.
    fn check(&self, run: &mut Run, bank: &Bank, case: &str) -> Result<()> {
        let (h, i, picks) = (bank.hidden(), bank.intermediate(), self.ids.len());
        let row = |p: usize| &self.x[p / self.share * h..][..h];
        let all = parallel(picks, |p| bank.expert(self.ids[p] as usize, row(p)));
        let (mid, y): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let guarded = |rows: Vec<Vec<u16>>| [rows.concat(), vec![0xFFFF; GUARD]].concat();
        let kernel = if bank.form == StoredForm::Rg16 { "stored_rg16" } else { "stored_fp8" };
        let shape = format!("{h}/{i}, {picks} picks, {case}");
        let bad = unequal(&self.mid.read(0, picks * i + GUARD)?, &guarded(mid));
        run.check(kernel, format!("{shape}: gate and up"), bad, true);
        let bad = unequal(&self.y.read(0, picks * h + GUARD)?, &guarded(y));
        run.check(kernel, format!("{shape}: down"), bad, true);
        Ok(())
    }
}

pub(super) fn run(run: &mut Run) -> Result<()> {
    products(run)?;
    rows(run)?;
    fetch(run)?;
    planes(run)?;
    refused(run)
}

fn products(run: &mut Run) -> Result<()> {
    use StoredForm::{Fp8Block, Rg16};
    let (dev, op) = (run.dev.clone(), StoredExperts::new(&run.dev)?);
    // (form, [experts, hidden, intermediate], rows, picks a row). Fewer experts than picks: some come again.
    let cases = [
        (Rg16, [5usize, 256usize, 64usize], 3usize, 4usize),
        (Rg16, [5, 80, 48], 3, 4),
        (Rg16, [3, 2560, 640], 2, 3),
        (Fp8Block, [5, 256, 128], 3, 4),
        (Fp8Block, [5, 144, 80], 3, 4),
        (Fp8Block, [3, 2560, 640], 2, 3),
    ];
    for (form, shape, rows, top) in cases {
        for divide in [false, true] {
            if divide && form == Fp8Block {
                continue; // nothing to divide by
            }
            let bank = Bank::random(&mut run.rng, form, shape, divide)?;
            let stride = bank.shape.stride as usize;
            let records = dev.alloc(shape[0] * stride)?;
            bank.records.iter().enumerate().try_for_each(|(e, r)| records.write(e * stride, r))?;
            for share in [top, 1] {
                let picks = Picks::random(run, &bank, rows * top, share)?;
                let at: Vec<u64> = picks.ids.iter().map(|e| records.at(*e as usize * stride)).collect();
                let at = dev.upload(&at)?;
                picks.launch(run, &op, &bank, (at.ptr(), 0), false)?;
                run.stream.synchronize()?;
                picks.check(run, &bank, &format!("{share} a row, divisor {divide}"))?;
            }
        }
    }
    Ok(())
}

/// Experts in plain rows.
struct RowBank {
    gate_up: Words,
    down: Words,
    hidden: usize,
    intermediate: usize,
}

impl RowBank {
    /// `formats` of gate with up, and of down.
    fn random(rng: &mut Rng, formats: [WeightFormat; 2], [e, h, i]: [usize; 3]) -> Self {
        // Rows of integers are stored in whole 128 k, others in steps of their kernels.
        let mut words = |f: WeightFormat, n, k| {
            let whole = matches!(f, WeightFormat::Bf16 | WeightFormat::Fp8Row);
            Words::random(rng, f, n, k, if whole { f.step() } else { 128 })
        };
        let gate_up = words(formats[0], e * 2 * i, h);
        RowBank { gate_up, down: words(formats[1], e * h, i), hidden: h, intermediate: i }
    }

    /// `silu(gate) up` of an expert for one row, and what down makes of it.
    fn expert(&self, e: usize, x: &[u16]) -> (Vec<u16>, Vec<u16>) {
        let (h, i) = (self.hidden, self.intermediate);
        let values = |v: &[u16]| v.iter().map(|w| bf16(*w)).collect::<Vec<f32>>();
        let product = |w: &Words, row: usize, x: &[f32]| {
            let (codes, scales, group) = w.exact(row);
            chain::sum(&codes[..x.len()], &scales, x, group) * w.factor(row) as f32
        };
        let x = values(x);
        let gate_up = |r: usize| rbf(product(&self.gate_up, 2 * i * e + r, &x));
        let mid: Vec<u16> = (0..i).map(|r| w4a4::swiglu(gate_up(r), gate_up(i + r))).collect();
        let v = values(&mid);
        let y = (0..h).map(|r| f32_to_bf16(product(&self.down, h * e + r, &v))).collect();
        (mid, y)
    }
}

/// Every format of plain rows, and two formats in one expert.
fn rows(run: &mut Run) -> Result<()> {
    let (dev, op) = (run.dev.clone(), StoredExperts::new(&run.dev)?);
    let alike = StoredExperts::ROWS.map(|f| [f, f]);
    let mixed = [[WeightFormat::Q4G64, WeightFormat::Q5G64], [WeightFormat::Q4G64, WeightFormat::Q6G64]];
    // Groups and spans of unequal length, rows that end within a group and within a block of 32 rows.
    let shapes =
        [([5usize, 256usize, 64usize], 3usize, 4usize), ([4, 200, 72], 2, 3), ([3, 1096, 520], 1, 3)];
    for formats in alike.into_iter().chain(mixed) {
        for ([e, h, i], n, top) in shapes {
            let bank = RowBank::random(&mut run.rng, formats, [e, h, i]);
            let (gate_up, down) = (bank.gate_up.upload(&dev)?, bank.down.upload(&dev)?);
            for share in [top, 1] {
                let picks = n * top;
                let ids: Vec<i32> = (0..picks).map(|_| run.rng.below(e) as i32).collect();
                let mut x = run.rng.bf16(picks.div_ceil(share) * h, 1.0);
                x[..16].copy_from_slice(&[0, 0x8000].repeat(8));
                let (device_ids, device_x) = (dev.upload(&ids)?, dev.upload(&x)?);
                let (mid, y) = (dev.alloc(2 * (picks * i + GUARD))?, dev.alloc(2 * (picks * h + GUARD))?);
                let first = RowProduct { w: &gate_up, ids: device_ids.ptr(), n: 2 * i, pairs: true };
                let second = RowProduct { w: &down, n: h, pairs: false, ..first };
                op.rows(&run.stream, &first, picks, device_x.ptr(), share, mid.ptr(), false)?;
                op.rows(&run.stream, &second, picks, mid.ptr(), 1, y.ptr(), true)?;
                run.stream.synchronize()?;
                let all = parallel(picks, |p| bank.expert(ids[p] as usize, &x[p / share * h..][..h]));
                let (want_mid, want): (Vec<_>, Vec<_>) = all.into_iter().unzip();
                let guarded = |rows: Vec<Vec<u16>>| [rows.concat(), vec![0xFFFF; GUARD]].concat();
                let [up_tag, down_tag] = formats.map(WeightFormat::tag);
                let shape = format!("{h}/{i}, {picks} picks, {share} a row");
                let bad = unequal(&mid.read(0, picks * i + GUARD)?, &guarded(want_mid));
                run.check("stored_rows", format!("{up_tag} {shape}: gate and up"), bad, true);
                let bad = unequal(&y.read(0, picks * h + GUARD)?, &guarded(want));
                run.check("stored_rows", format!("{down_tag} {shape}: down"), bad, true);
            }
        }
    }
    Ok(())
}

/// Records of which the host has half.
fn fetch(run: &mut Run) -> Result<()> {
    use StoredForm::{Fp8Block, Rg16};
    let (dev, op) = (run.dev.clone(), StoredExperts::new(&run.dev)?);
    // The record of 144/80 ends in the middle of 16 bytes; that of 2560/640 takes many blocks.
    for (form, shape, picks) in [
        (Fp8Block, [8usize, 144usize, 80usize], StoredExperts::PICKS),
        (Rg16, [6, 256, 64], 9),
        (Rg16, [6, 256, 64], 1),
        (Rg16, [4, 2560, 640], 8),
    ] {
        let (experts, bank) = (shape[0], Bank::random(&mut run.rng, form, shape, false)?);
        let (record, stride) = (bank.records[0].len(), bank.shape.stride as usize);
        let first_away = run.rng.below(2);
        let away: Vec<u32> = (0..experts).map(|e| u32::from(e % 2 == first_away)).collect();
        let mut host = dev.pinned(experts * stride)?;
        let near = dev.alloc(experts * stride)?;
        host.as_mut_slice().fill(0xA5);
        for (e, bytes) in bank.records.iter().enumerate() {
            if away[e] != 0 {
                host.as_mut_slice()[e * stride..][..record].copy_from_slice(bytes);
            } else {
                near.write(e * stride, bytes)?;
            }
        }
        let whole: Vec<u64> = (0..experts)
            .map(|e| if away[e] != 0 { host.device_ptr() + (e * stride) as u64 } else { near.at(e * stride) })
            .collect();
        let (device_whole, device_away) = (dev.upload(&whole)?, dev.upload(&away)?);
        let place = record.next_multiple_of(16) + 48;
        let stage = dev.alloc(picks * place)?;
        let case = format!("{} of {record} bytes", if picks == 1 { "a record" } else { "records" });

        // Calls one behind another, as layers are, take the same places: none may see what another left.
        let calls: Vec<(Picks, DeviceBuffer)> = (0..4)
            .map(|_| Ok((Picks::random(run, &bank, picks, 1)?, dev.alloc(8 * picks)?)))
            .collect::<Result<_>>()?;
        for (c, (p, at)) in calls.iter().enumerate() {
            let (w, a, ids) = (device_whole.ptr(), device_away.ptr(), p.device_ids.ptr());
            op.fetch(&run.stream, w, a, ids, picks, record, stage.ptr(), place, at.ptr(), c > 0)?;
            if c == 0 {
                run.stream.synchronize()?;
                // Whole places: the others and what follows a record keep their poison.
                let mut want = vec![0xFFu8; picks * place];
                for (at, e) in p.ids.iter().enumerate().map(|(at, e)| (at, *e as usize)) {
                    let first = p.ids[..at].iter().all(|other| *other as usize != e);
                    if first && away[e] != 0 {
                        let n = record.next_multiple_of(16);
                        want[at * place..][..n].copy_from_slice(&host.as_slice()[e * stride..][..n]);
                    }
                }
                let bad = unequal(&stage.read(0, picks * place)?, &want);
                run.check("expert_fetch", format!("{picks} picks, {case}: bytes"), bad, true);
            }
            p.launch(run, &op, &bank, (at.ptr(), 0), c > 0)?;
        }
        run.stream.synchronize()?;
        for (c, (p, at)) in calls.iter().enumerate() {
            let want: Vec<u64> = p
                .ids
                .iter()
                .map(|e| match p.ids.iter().position(|other| other == e) {
                    Some(first) if away[*e as usize] != 0 => stage.at(first * place),
                    _ => whole[*e as usize],
                })
                .collect();
            let bad = unequal(&at.read(0, picks)?, &want);
            run.check("expert_fetch", format!("{picks} picks, {case}, call {c}: addresses"), bad, true);
            p.check(run, &bank, &format!("fetched by call {c}"))?;
        }
        let p = Picks::random(run, &bank, picks, picks)?;
        p.launch(run, &op, &bank, (device_whole.ptr(), device_away.ptr()), false)?;
        run.stream.synchronize()?;
        p.check(run, &bank, "read where they are")?;
    }
    Ok(())
}

fn planes(run: &mut Run) -> Result<()> {
    let (dev, op) = (run.dev.clone(), StoredExperts::new(&run.dev)?);
    for (experts, offsets) in
        [(1usize, [0usize, 4096, 8192]), (256, [16, 0, 4]), (300, [5 << 32, 0, 7 << 33])]
    {
        let whole: Vec<u64> = (0..experts).map(|_| run.rng.next_u64() >> 16).collect();
        let (dw, out) = (dev.upload(&whole)?, dev.alloc(8 * (3 * experts + GUARD))?);
        op.planes(&run.stream, dw.ptr(), experts, offsets, out.ptr(), false)?;
        run.stream.synchronize()?;
        let all = offsets.iter().flat_map(|o| whole.iter().map(|w| w + *o as u64));
        let want: Vec<u64> = all.chain([u64::MAX; GUARD]).collect();
        let bad = unequal(&out.read(0, want.len())?, &want);
        run.check("expert_planes", format!("{experts} experts, planes at {offsets:?}"), bad, true);
    }
    Ok(())
}

/// What the kernels do not take is an error, and nothing is launched.
fn refused(run: &mut Run) -> Result<()> {
    use StoredForm::{Fp8Block, Rg16};
    let op = StoredExperts::new(&run.dev)?;
    let fine = StoredProduct {
        at: 0,
        away: 0,
        ids: 0,
        last: 0,
        divide: false,
        codes: 0,
        scales: 0,
        n: 32,
        k: 32,
        pairs: false,
    };
    // Held: a launch that was not refused would be noted instead of made.
    run.stream.hold();
    let product = |form, p: StoredProduct, share| op.product(&run.stream, form, &p, 1, 0, share, 0, false);
    let fetch =
        |picks, record, stride| op.fetch(&run.stream, 0, 0, 0, picks, record, 0, stride, 0, false).is_ok();
    let taken = [
        ("k = 24, rg16", product(Rg16, StoredProduct { k: 24, ..fine }, 1).is_ok()),
        ("k = 24, fp8", product(Fp8Block, StoredProduct { k: 24, ..fine }, 1).is_ok()),
        ("n = 24, rg16", product(Rg16, StoredProduct { n: 24, ..fine }, 1).is_ok()),
        ("codes at 2, rg16", product(Rg16, StoredProduct { codes: 2, ..fine }, 1).is_ok()),
        ("codes at 8, fp8", product(Fp8Block, StoredProduct { codes: 8, ..fine }, 1).is_ok()),
        ("scales at 2, fp8", product(Fp8Block, StoredProduct { scales: 2, ..fine }, 1).is_ok()),
        (
            "rows larger than shared memory, fp8",
            product(Fp8Block, StoredProduct { away: 16, k: 1 << 14, ..fine }, 1).is_ok(),
        ),
        ("no pick a row", product(Rg16, fine, 0).is_ok()),
        ("33 picks", fetch(33, 4096, 4096)),
        ("records larger than their places", fetch(1, 4097, 4096)),
        ("places of 4100 bytes", fetch(1, 4096, 4100)),
    ];
    let matrix = |format, n: usize, k: usize, divide| -> Result<Linear> {
        let codes = run.dev.alloc(16)?;
        let (high, scales, row_scale) = (None, None, None);
        Ok(Linear { format, n, k, k_pad: 128, codes, high, scales, row_scale, tensor_scale: 1.0, divide })
    };
    let rows = |w: Result<Linear>, n, pairs| -> Result<bool> {
        Ok(op.rows(&run.stream, &RowProduct { w: &w?, ids: 0, n, pairs }, 1, 0, 1, 0, false).is_ok())
    };
    use WeightFormat::{Bf16, Mxfp8, Q4G64};
    let plain = [
        ("rows of a format without a kernel", rows(matrix(Mxfp8, 64, 64, false), 32, false)?),
        ("rows of 60", rows(matrix(Q4G64, 64, 60, false), 32, false)?),
        ("rows of 136 in 128", rows(matrix(Q4G64, 64, 136, false), 32, false)?),
        ("64 rows, 48 an expert", rows(matrix(Bf16, 64, 64, false), 48, false)?),
        ("no row an expert", rows(matrix(Bf16, 64, 64, false), 0, false)?),
        ("gate and up of 33 rows", rows(matrix(Bf16, 66, 64, false), 33, true)?),
        ("rows and a divisor", rows(matrix(Bf16, 64, 64, true), 32, false)?),
    ];
    let launched = run.stream.release().len();
    for (what, taken) in taken.into_iter().chain(plain) {
        run.check("stored", format!("refused: {what}"), f64::from(u8::from(taken)), true);
    }
    run.check("stored", "refused: nothing was launched".into(), launched as f64, true);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values at the offsets that products are given are those of the oracle's matrices.
    #[test]
    fn offsets_lead_to_the_values_that_were_packed() {
        let mut rng = Rng::new(3);
        for [h, i] in [[256usize, 64usize], [80, 48]] {
            let bank = Bank::random(&mut rng, StoredForm::Rg16, [2, h, i], false).unwrap();
            let [[up_at, _], [down_at, _]] = bank.offsets();
            for (m, record) in bank.experts.iter().zip(&bank.records) {
                let value = |m: &Matrix, row: usize| -> Vec<f64> {
                    let at = row * m.k..(row + 1) * m.k;
                    at.map(|c| f64::from(m.codes[c]) * f64::from(m.scales[c / 16])).collect()
                };
                for r in 0..2 * i {
                    assert_eq!(w4a4::row(record, up_at, r, h), value(&m[r % 2], r / 2));
                }
                for r in 0..h {
                    assert_eq!(w4a4::row(record, down_at, r, i), value(&m[2], r));
                }
            }
        }
        for [h, i] in [[256usize, 128usize], [144, 80]] {
            let bank = Bank::random(&mut rng, StoredForm::Fp8Block, [2, h, i], false).unwrap();
            let [[codes, scales], [down_codes, down_scales]] = bank.offsets();
            for (m, record) in bank.experts.iter().zip(&bank.records) {
                let float = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                let floats = |at: usize, n: usize| -> Vec<f32> {
                    record[at..at + 4 * n].chunks_exact(4).map(float).collect()
                };
                assert_eq!(record[codes..][..2 * h * i], [&m[0].words[..], &m[1].words].concat());
                assert_eq!(record[down_codes..][..h * i], m[2].words);
                let n = m[0].scales.len();
                assert_eq!(floats(scales, 2 * n), [&m[0].scales[..], &m[1].scales].concat());
                assert_eq!(floats(down_scales, n), m[2].scales);
            }
        }
    }

    /// Results that differ from pick to pick and are numbers, so that equal bits say something.
    #[test]
    fn random_experts_give_numbers_of_many_values() {
        let mut rng = Rng::new(4);
        let shapes = [(StoredForm::Rg16, [2usize, 256usize, 64usize]), (StoredForm::Fp8Block, [2, 144, 80])];
        for (form, shape) in shapes {
            let bank = Bank::random(&mut rng, form, shape, form == StoredForm::Rg16).unwrap();
            let x = rng.bf16(shape[1], 1.0);
            let (mid, y) = bank.expert(1, &x);
            for v in [mid, y] {
                assert!(v.iter().all(|w| bf16(*w).is_finite()));
                let mut distinct = v.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() > v.len() / 2, "{} of {}", distinct.len(), v.len());
            }
        }
    }

    /// The same of experts in plain rows of every format.
    #[test]
    fn random_rows_give_numbers_of_many_values() {
        let mut rng = Rng::new(5);
        for format in StoredExperts::ROWS {
            let bank = RowBank::random(&mut rng, [format; 2], [2, 200, 72]);
            let x = rng.bf16(200, 1.0);
            let (mid, y) = bank.expert(1, &x);
            for v in [mid, y] {
                assert!(v.iter().all(|w| bf16(*w).is_finite()));
                let mut distinct = v.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() > v.len() / 2, "{format:?}: {} of {}", distinct.len(), v.len());
            }
        }
    }
}
