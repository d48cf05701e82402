// Answers play.html's four requests in the visitor's browser. `python -m tests.play --site` writes
// start.json and the models as graphs, which contain play.draw: pictures and dB are Python's.

const kept = {}                             // promises of what was loaded, by name
const once = (name, make) =>                // what has failed is tried again
  kept[name] ??= make(name).catch(error => { delete kept[name]; throw error })
let about, bytes = 0, all = 0, turn = 0     // about: start.json; bytes: loaded so far, of all

// ---------------------------------------------------------------------------------------- loading
async function load(name) {                 // returns a file as the URL of a blob
  const { url, integrity, ...file } = about.files[name], parts = []
  all += file.bytes
  try {
    const answer = await fetch(url), reader = answer.body.getReader()
    if (!answer.ok) throw Error(answer.status)
    for (let part; (part = (await reader.read()).value); parts.push(part)) {
      const [now, of] = [bytes += part.length, all].map(n => (n / 1e6).toFixed(1))
      document.querySelector("#busy").textContent =
        now == of ? "computing ..." : `loading the models: ${now} of ${of} MB`
    }
    const type = url.endsWith(".wasm") ? "application/wasm" : "text/javascript"
    const blob = URL.createObjectURL(new Blob(parts, { type }))
    await fetch(blob, { integrity })        // the first fetch would show no progress with a hash
    return blob
  } catch (error) {
    all -= file.bytes
    bytes -= parts.reduce((sum, part) => sum + part.length, 0)
    throw Error(`Cannot load ${url} (${error.message}). Are you online? Is the file there?`)
  }
}
async function loadRuntime() {
  const [code, wasm] = await Promise.all(Object.keys(about.files).slice(0, 2).map(load))
  const ort = await import(code)
  Object.assign(ort.env.wasm, { wasmPaths: { wasm }, numThreads: 1 })
  return ort
}
async function loadGraph(name) {
  const [ort, graph] = await Promise.all([once("runtime", loadRuntime), load(name)])
  return ort.InferenceSession.create(graph)
}

// ------------------------------------------------------------------------------------- predictions
function context(w, h) {
  return Object.assign(document.createElement("canvas"), { width: w, height: h }).getContext("2d")
}
function paint(pictures) {                  // a tensor (n 3 h w), returns n URLs
  const [n, , h, w] = pictures.dims, size = 3 * h * w
  return [...Array(n).keys()].map(i => {
    const part = pictures.data.subarray(i * size, (i + 1) * size), picture = context(w, h)
    picture.putImageData(new pictures.constructor(part, [1, 3, h, w]).toImageData(), 0, 0)
    return picture.canvas.toDataURL()
  })
}
async function predict(session, { Tensor }, image, partner, { mask, view, probe, alpha }) {
  const ids = (mask, value) => {
    const found = mask.flatMap((masked, i) => masked == value ? [BigInt(i)] : [])
    return new Tensor("int64", found, [1, found.length])
  }
  const run = (mask, others) => session.run({ image, partner, others,
    ids_keep: ids(mask, false), ids_mask: ids(mask, true),
    probe: new Tensor("int64", [BigInt(probe)], [1]), alpha: new Tensor("float32", [alpha], []) })
  const { shape } = session.inputMetadata.find(({ name }) => name == "others")
  let others = new Tensor("float32", new Float32Array(shape.reduce((a, b) => a * b)), shape)
  const began = performance.now(), flipped = mask.with(probe, !mask[probe])
  if (view == "change")                     // without the only visible patch, nothing changes
    others = (await run(new Set(flipped).size == 2 ? flipped : mask, others)).decoded
  const made = await run(mask, others), ms = performance.now() - began
  return { urls: [made.seen, made[view]].flatMap(paint), psnrs: [...made.psnrs.data],
    flat: made.flat.data[0], ms }
}

const requests = {
  async start() {
    const answer = await fetch("start.json").catch(error => error)
    if (!answer.ok) throw Error("Cannot load start.json: open this page from a web server, e.g. "
      + "python -m http.server.")
    return about = await answer.json()
  },
  order: async kind => [...about.orders[kind][turn++ % 50]],
  async image(file) {                       // as open_image, but the browser resizes
    const photo = await createImageBitmap(file).catch(() => {
      throw Error("cannot read this image: try .jpg or .png, or a smaller one")
    })
    const [H, W] = about.size, scale = Math.min(photo.height / H, photo.width / W)
    const [h, w] = [scale * H, scale * W], picture = context(W, H)
    Object.assign(picture, { imageSmoothingQuality: "high", fillStyle: "white" })
    picture.fillRect(0, 0, W, H)            // behind what is transparent
    picture.drawImage(photo, (photo.width - w) / 2, (photo.height - h) / 2, w, h, 0, 0, W, H)
    return picture.canvas.toDataURL()
  },
  async predict(body) {
    const state = JSON.parse(body)
    const sessions = await Promise.all(about.models.map(model => {
      const mixed = +(model.unmixes && !!state.partner), scale = model.renders ? state.scale : 1
      const leak_free = +(model.normalized && !!state.leak_free)
      return once(`${model.file}_mixed${mixed}_scale${scale}_leak_free${leak_free}.onnx`, loadGraph)
    }))
    const ort = await kept.runtime, tensor = url => ort.Tensor.fromImage(url)
    const [image, partner] = await Promise.all(
      [state.image, state.partner || state.image].map(url => once(url, tensor)))
    const answers = []                      // one after another
    for (const session of sessions) answers.push(await predict(session, ort, image, partner, state))
    return answers
  },
}
window.site = async (path, body) => requests[path](body)
