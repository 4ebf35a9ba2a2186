// Search without a server. A browser refuses to start a worker from a page that it read from disk, so the theme's
// search runs in a hidden frame there. The theme looks for the name IFrameWorker; English needs no importScripts.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#ready = new Promise((resolve) => {
        this.#frame.addEventListener("load", () => {
          const inner = this.#frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = inner.document.createElement("script");
          script.src = url;
          script.onload = () => resolve(inner);
          inner.document.head.append(script);
        }, { once: true });
      });
      (document.body ?? document.documentElement).append(this.#frame);
    }

    postMessage(data) {
      this.#ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
