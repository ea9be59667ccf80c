// A page opened from a disk may not start a worker, and search runs in one: there, a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = () => {}
      inside.__index = window.__index
      this.ready = new Promise(resolve => {
        const tag = inside.document.createElement("script")
        tag.onload = () => resolve(inside)
        tag.src = script
        inside.document.body.append(tag)
      })
    }
    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {}
  }
}
