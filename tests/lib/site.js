// The four answers that play.html needs, without a server: `python -m tests.play --site` wrote what
// runs here, in the visitor's browser. Its graphs contain play.draw, so pictures and dB are Python's.

const kept = {}                             // promises of what was loaded, by name
let start, bytes = 0, all = 0               // bytes: loaded so far, of all

const once = (name, make) =>                // what has failed is tried again
  kept[name] ??= make(name).catch(error => { delete kept[name]; throw error })
function context(w, h) {
  const canvas = Object.assign(document.createElement("canvas"), { width: w, height: h })
  return canvas.getContext("2d", { willReadFrequently: true })
}

// ---------------------------------------------------------------------------------------- loading
async function load(name) {                 // returns a file as the URL of a blob
  const { url, integrity, ...file } = start.files[name], parts = []
  all += file.bytes
  try {
    const answer = await fetch(url), reader = answer.body.getReader()
    if (!answer.ok) throw Error(answer.status)
    for (let part; (part = (await reader.read()).value); parts.push(part)) {
      bytes += part.length
      const [now, of] = [bytes, all].map(n => (n / 1e6).toFixed(1))
      document.querySelector("#busy").textContent =
        now == of ? "computing ..." : `loading the models: ${now} of ${of} MB`
    }
    const blob = new Blob(parts, { type: "text/javascript" })
    // the hash is checked here: with it, the first fetch would show no progress
    return (await fetch(URL.createObjectURL(blob), { integrity })).url
  } catch (error) {
    throw Error(`Cannot load ${url} (${error.message}). Are you online? Is the file there?`)
  }
}
async function loadRuntime() {
  const [code, wasm] = await Promise.all(Object.keys(start.files).slice(0, 2).map(load))
  const ort = await import(code)
  Object.assign(ort.env.wasm, { wasmPaths: { wasm }, numThreads: 1 })
  return ort
}
async function loadGraph(name) {
  const [ort, graph] = await Promise.all([once("runtime", loadRuntime), load(name)])
  return ort.InferenceSession.create(graph)
}

// ------------------------------------------------------------------------------------- predictions
async function pixels(url) {                // of an image, as a canvas has them
  const image = Object.assign(new Image(), { src: url }), [h, w] = start.size, picture = context(w, h)
  await image.decode()
  picture.drawImage(image, 0, 0)
  return picture.getImageData(0, 0, w, h).data
}
function paint({ data, dims: [n, h, w] }) {                // (n h w 4), returns n URLs
  const picture = context(w, h), size = 4 * h * w
  return [...Array(n).keys()].map(i => {
    const part = new Uint8ClampedArray(data.subarray(i * size, (i + 1) * size))
    picture.putImageData(new ImageData(part, w, h), 0, 0)
    return picture.canvas.toDataURL()
  })
}
async function predict(session, images, { mask, view, probe, alpha }) {
  const { Tensor } = await kept.runtime, { shape } = session.inputMetadata.find(x => x.name == "others")
  const ids = (mask, value) => {
    const found = mask.flatMap((masked, i) => masked == value ? [BigInt(i)] : [])
    return new Tensor("int64", found, [1, found.length])
  }
  const run = (mask, others) => session.run({ others, ids_keep: ids(mask, false),
    ids_mask: ids(mask, true), probe: new Tensor("int64", [BigInt(probe)], [1]),
    alpha: new Tensor("float32", [alpha], []), images: new Tensor("uint8",
      images.flatMap(x => [...x]), [images.length, ...start.size, 4]) })
  let others = new Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b)), shape)
  const began = performance.now(), flipped = mask.with(probe, !mask[probe])
  if (view == "change")                     // without a patch that is alone, nothing changes
    others = (await run(new Set(flipped).size == 2 ? flipped : mask, others)).preds
  const made = await run(mask, others), ms = performance.now() - began
  const urls = [made.seen, made[view]].flatMap(paint)
  return { urls, psnrs: [...made.psnrs.data], flat: made.flat.data[0], ms }
}

window.site = {
  async start() {
    const answer = await fetch("start.json").catch(error => error)
    if (!answer.ok) throw Error("Cannot load start.json. This page must come from a web server, "
      + "e.g. python -m http.server.")
    return start = await answer.json()
  },
  async order(kind) {
    const orders = start.orders[kind]
    return [...orders[Math.floor(orders.length * Math.random())]]
  },
  async image(file) {                       // like open_image, but the browser resizes
    const photo = await createImageBitmap(file).catch(() => {
      throw Error("cannot read this image: try .jpg or .png, or a smaller one")
    })
    const [H, W] = start.size, scale = Math.min(photo.height / H, photo.width / W)
    const [h, w] = [scale * H, scale * W], picture = context(W, H)
    Object.assign(picture, { imageSmoothingQuality: "high", fillStyle: "white" })
    picture.fillRect(0, 0, W, H)            // behind what is transparent
    picture.drawImage(photo, (photo.width - w) / 2, (photo.height - h) / 2, w, h, 0, 0, W, H)
    return picture.canvas.toDataURL()
  },
  async predict(state) {
    const [own, other] = await Promise.all([state.image, state.partner].map(
      url => url && once(url, pixels)))
    const asked = await Promise.all(start.models.map(async model => {
      const mixed = +(model.unmixes && !!other), scale = model.renders ? state.scale : 1
      const leak_free = +(model.normalized && !!state.leak_free)
      const name = `${model.file}_mixed${mixed}_scale${scale}_leak_free${leak_free}.onnx`
      return [await once(name, loadGraph), mixed ? [own, other] : [own], state]
    }))
    const answers = []
    for (const each of asked) answers.push(await predict(...each))     // one after another
    return answers
  },
}
